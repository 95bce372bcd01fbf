"""Every program under examples/ does what it says, and so do the commands that `sapwood up` offers to try."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TEXT = " the capital of the country of France."


def _run(cluster: Any, *command: str) -> str:
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ,
        "SAPWOOD_ROUTER": cluster.grpc,
        "OPENAI_BASE_URL": f"http://{cluster.http}/v1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_python_stubs_stream(cluster: Any) -> None:
    shown = _run(cluster, sys.executable, str(EXAMPLES / "python_client.py"))
    assert shown.startswith(TEXT)
    assert shown.endswith("[FINISH_REASON_LENGTH, 16 tokens]\n")


def test_the_openai_client_completes_streams_and_chats(cluster: Any) -> None:
    shown = _run(cluster, sys.executable, str(EXAMPLES / "openai_client.py"))
    assert f"completed: '{TEXT}" in shown
    assert f"streamed: {TEXT}" in shown
    assert re.search(r"chatted: \S", shown)


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_answered(cluster: Any) -> None:
    shown = _run(cluster, sys.executable, str(EXAMPLES / "tools.py"))
    called = re.search(r"called: weather\((.*?)\) -> (.*)", shown, re.DOTALL)
    assert called
    arguments = json.loads(called[1])
    assert called[2].startswith(f"{arguments['city']}: sun for {arguments['days']} days\n")
    assert "answered: " in shown


@pytest.mark.slow
def test_an_engine_answers_a_batch_fills_a_schema_and_scores(cluster: Any) -> None:
    shown = _run(cluster, sys.executable, str(EXAMPLES / "engine.py"))
    assert re.search(r"^batch: The capital of France is' Paris", shown, re.MULTILINE)
    assert json.loads(re.search(r"^schema: (.*?)^likeliest", shown, re.MULTILINE | re.DOTALL)[1])["capital"]
    assert re.search(r"^likeliest: \w+ \(-\d", shown, re.MULTILINE)
    assert "streamed: Paris" in shown


def test_grpcurl_lists_and_streams(cluster: Any) -> None:
    shown = _run(cluster, str(EXAMPLES / "grpcurl.sh"))
    listed = shown.splitlines()[:4]
    assert listed[0] == "grpc.health.v1.Health"
    assert listed[1:3] == [f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]
    assert listed[3] == "sapwood.v1.Router"
    assert "rpc Generate ( .sapwood.v1.RouterGenerateRequest ) returns ( stream" in shown
    assert '"status": "SERVING"' in shown
    texts = re.findall(r'^  "text": "(.*)"', shown, re.MULTILINE)
    assert "".join(texts).startswith(TEXT)
    assert len(texts) > 3


@pytest.mark.parametrize("service", ["tokenizer", "worker"])
def test_grpcurl_lists_and_calls_each_service(cluster: Any, service: str) -> None:
    address = cluster.tokenizer if service == "tokenizer" else cluster.workers[0]
    assert f"sapwood.v1.{service.capitalize()}\n" in _run(cluster, "grpcurl", "-plaintext", address, "list")
    health = _run(cluster, "grpcurl", "-plaintext", address, "grpc.health.v1.Health/Check")
    assert "SERVING" in health
    if service == "tokenizer":
        command = ["-d", '{"texts": ["The capital of France is"]}', address, "sapwood.v1.Tokenizer/Tokenize"]
        shown = _run(cluster, "grpcurl", "-plaintext", *command)
        assert [int(token) for token in re.findall(r"\d+", shown)] == [2, 818, 5279, 529, 7001, 563]
    else:
        shown = _run(cluster, "grpcurl", "-plaintext", address, "sapwood.v1.Worker/GetModelInfo")
        assert '"model": "demo"' in shown


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed (make test installs it where it may)")
@pytest.mark.skipif(
    not (EXAMPLES / "node" / "node_modules").is_dir(), reason="run `npm ci` in examples/node (make test does)"
)
def test_node_streams_with_the_proto_files_alone(cluster: Any) -> None:
    shown = _run(cluster, "node", str(EXAMPLES / "node" / "generate.js"))
    assert shown.startswith(TEXT)
    assert shown.endswith("[FINISH_REASON_LENGTH, 32 tokens]\n")


def test_the_commands_to_try_work(cluster: Any) -> None:
    shown = "\n".join(cluster.lines)
    block = shown.partition("Try, in another terminal:")[2].partition("Ctrl-C stops it")[0]
    commands = re.split(r"\n(?=  \S)", block)
    commands = [command.strip() for command in commands if command.strip()]
    assert len(commands) == 5
    for command in commands:
        command = re.sub(r"(max[-_]tokens\W+)32\b", r"\g<1>8", command)  # a token takes a tenth of a second on one core
        scripts = sysconfig.get_path("scripts")
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SAPWOOD_MAX_TOKENS": "8"}  # chat would continue for 512
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
            input="Hi\n",
        )
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip(), command
