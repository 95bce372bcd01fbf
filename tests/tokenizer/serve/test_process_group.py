"""Several tokenizer processes behind one port: real processes, killed and replaced."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def connect(address: str) -> grpc.aio.Channel:
    """A connection of its own."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


@linux
async def test_connections_are_spread_over_the_processes(start_service: Callable, byte_level: Tokenizer) -> None:
    service = start_service("--processes", "2")
    (first, second) = children(service.process.pid)
    channels = [connect(service.address) for _ in range(24)]
    seen = set()
    for number, channel in enumerate(channels):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        response = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=[f"text {number}"]))
        assert list(response.sequences[0].ids) == byte_level.encode(f"text {number}").ids
        seen.add((await stub.GetInfo(tokenizer_pb2.GetInfoRequest())).exact_cache.misses)
    assert max(seen) < 24, "no process had them all"
    for channel in channels:
        await channel.close()
    assert service.stop() == 0
    assert not is_running(first) and not is_running(second)


@linux
async def test_a_process_that_is_killed_is_replaced_and_its_clients_go_on(
    start_service: Callable, byte_level: Tokenizer
) -> None:
    service = start_service("--processes", "2")
    stop = asyncio.Event()
    served: set[int] = set()

    async def client(number: int) -> None:
        """Asks all the time, again where a connection broke, as gRPC's own retries would."""
        done = 0
        async with connect(service.address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            while not stop.is_set():
                request = tokenizer_pb2.TokenizeRequest(texts=[f"{number} {done}"])
                try:
                    response = await stub.Tokenize(request, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.UNAVAILABLE
                    continue
                assert list(response.sequences[0].ids) == byte_level.encode(f"{number} {done}").ids
                done += 1
                served.add(number)
                await asyncio.sleep(0)

    clients = [asyncio.create_task(client(number)) for number in range(6)]
    for _ in range(2):
        before = children(service.process.pid)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda gone=victim: len(children(service.process.pid) - {gone}) == 2)
    served.clear()
    async with asyncio.timeout(60):
        while len(served) < len(clients) and not any(task.done() for task in clients):
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.gather(*clients)
    assert service.stop() == 0


@linux
def test_processes_do_not_outlive_the_one_that_started_them(start_service: Callable) -> None:
    service = start_service("--processes", "2")
    started = children(service.process.pid)
    service.process.kill()
    service.process.communicate()
    wait_until(lambda: not any(map(is_running, started)))


def test_a_group_that_cannot_start_says_so_and_ends(byte_level: Tokenizer, tmp_path: Path) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-m", "sapwood_tokenizer", "--model", str(tmp_path), "--processes", "2"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, reason in (
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--port", "0", "--metrics-port", port], "could not start"),
        ):
            ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)
            assert ended.returncode == 1
            assert reason in ended.stderr
            assert "Traceback" not in ended.stderr
