"""The text that `sapwood up` prints when the cluster is ready."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sapwood_common.models.model_files import model_name
from sapwood_common.models.packaged import model_hint
from sapwood_net.sockets.unix_socket import is_unix

if TYPE_CHECKING:
    from sapwood.cli.local.cluster import Endpoints
    from sapwood.cli.services import Services


def _command(name: str) -> str | None:
    """How a shell in this folder calls a program: by name if it would find the one next to this Python; None: there is
    none."""
    here = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found == str(here) or (found and not here.exists()):
        return name
    if not here.exists():
        return None
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


def welcome(services: Services, endpoints: Endpoints, seconds: float) -> str:
    """The text of `sapwood up` once all services answer: the address, and commands to try that need no key, no certificate and
    no missing program.

    Args:
        services: As they were started.
        endpoints: Where they answer.
        seconds: That the start took.
    """
    config = services.router.config
    secure = config.tls_cert is not None
    http, router = f"http{'s' * secure}://{endpoints.http}", endpoints.grpc
    sapwood = _command("sapwood") or "sapwood"
    address = "" if router == "127.0.0.1:50051" else f" --address {router}"
    hint = model_hint(services.worker.config.model)
    name = services.worker.config.served_model_name or model_name(services.worker.config.model)
    shown = f"""
ready to answer in {seconds:.1f} s{f". {name} is {hint}" if hint else ""}

  OpenAI API   {http}/v1
  gRPC         {router}
  tokenizer    {endpoints.tokenizer}
  workers      {" ".join(endpoints.workers)}
"""
    if config.ui:
        shown += f"  page         {http}/ui\n"
    if secure or config.api_keys is not None:  # the commands below would need certificates or a key
        return f"{shown}\nCtrl-C stops it.\n"
    grpc = f'''
  {sapwood} chat{address}
  {sapwood} generate{address} --max-tokens 32 --temperature 0 "The capital of France is"'''
    grpcurl = openai = ""
    if (program := _command("grpcurl")) is not None:
        grpcurl = f"""
  {program} -plaintext -d '{{"text": "The capital of France is", "sampling": {{"max_tokens": 32, "temperature": 0}}}}' \\
    {router} sapwood.v1.Router/Generate"""
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    if find_spec("openai") is not None:
        openai = f"""
  {_command(Path(sys.executable).name)} -c 'import openai; c = openai.OpenAI(base_url="{http}/v1", api_key="none"); \\
    print(c.chat.completions.create(model="{name}", messages={question}, max_tokens=32).choices[0].message.content)'"""
    if is_unix(router):
        grpc = grpcurl = ""
    return f"""{shown}
Try, in another terminal:
{grpc}
  curl {http}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": {question}, "max_tokens": 32}}'{grpcurl}{openai}

Ctrl-C stops it.
"""
