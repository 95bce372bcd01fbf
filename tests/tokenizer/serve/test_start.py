"""A tokenizer listens before it has read its files, and says so."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_testing.ports import port_of_its_own

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_while_it_reads_its_files_it_answers_health_checks_and_refuses_calls(
    small_vocabulary: Path, tmp_path: Path
) -> None:
    template, port = tmp_path / "template.jinja", port_of_its_own()
    os.mkfifo(template)  # reading it waits until somebody writes
    command = [sys.executable, "-m", "sapwood_tokenizer", "--port", str(port), "--metrics-port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--model", str(small_vocabulary), "--chat-template", str(template)
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health, tokenizer = health_pb2_grpc.HealthStub(channel), tokenizer_pb2_grpc.TokenizerStub(channel)
            asked, info = health_pb2.HealthCheckRequest(), tokenizer_pb2.GetInfoRequest()
            assert (await health.Check(asked, wait_for_ready=True, timeout=60)).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokenizer.GetInfo(info)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "starting" in caught.value.details()
            watch = health.Watch(asked)
            assert (await watch.read()).status == NOT_SERVING
            template.write_text("{{ messages[0].content }}")
            assert (await watch.read()).status == SERVING
            assert (await tokenizer.GetInfo(info)).vocab_size > 0
    finally:
        process.kill()
        await process.wait()


def test_one_whose_files_are_broken_ends(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    command = [
        sys.executable,
        "-m",
        "sapwood_tokenizer",
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--model",
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "tokenizer.json" in ended.stderr
    assert "Traceback" not in ended.stderr
