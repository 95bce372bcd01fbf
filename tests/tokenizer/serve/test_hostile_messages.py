"""Messages of every method, whose fields hold what nobody means: no answer says that the tokenizer is at fault."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_testing.hostile_messages import faults, hostile_messages

METHODS = {each.name: each for each in tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].methods}
GOOD: dict[str, Message] = {
    "Tokenize": tokenizer_pb2.TokenizeRequest(texts=["a"]),
    "ApplyChatTemplate": tokenizer_pb2.ApplyChatTemplateRequest(messages=[{"role": "user", "content": "a"}]),
}
"""What a message with one strange field is otherwise; of other methods nothing."""
TEMPLATE = Path(__file__).parents[1] / "template" / "templates" / "gemma3.jinja"
FORGED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u202e]")


@contextmanager
def started(model: Path, log: Path) -> Iterator[str]:
    """The address of a service that writes a log, in the log's folder."""
    command = [*(sys.executable, "-m", "sapwood_tokenizer", "--model", str(model), "--port", "0")]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--chat-template", str(TEMPLATE)], stderr=output, cwd=log.parent)
    try:
        while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
async def test_no_message_is_the_tokenizers_fault(small_vocabulary: Path, tmp_path: Path) -> None:
    wrong = []
    with started(small_vocabulary, tmp_path / "log") as address:
        async with open_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            for name, method in METHODS.items():
                messages = hostile_messages(method, GOOD.get(name))
                began = time.monotonic()
                wrong += [(name, *each) for each in await faults(stub, method, messages)]
                assert (await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["a"]))).sequences[0].ids
                print(f"{name}: {len(messages)} messages in {time.monotonic() - began:.1f} s")
    said = (tmp_path / "log").read_text()
    print(said[-2000:])
    assert not wrong, wrong[:5]
    assert "Traceback" not in said
    assert not FORGED.search(said.replace("\n", ""))
