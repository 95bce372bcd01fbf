"""``python -m sapwood_router`` as a process: its ports, its start, its end."""

import asyncio
import contextlib
import re
import signal
import sys

import grpc
import httpx
import pytest

from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_common.network.channel import open_channel
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.fake_worker import FakeWorker


class RouterProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.ports: dict[str, int] = {}

    async def wait_for(self, pattern: str) -> re.Match:
        async with asyncio.timeout(60):
            while True:
                line = (await self.process.stderr.readline()).decode()
                assert line, "\n".join(self.lines)
                self.lines.append(line)
                if found := re.search(pattern, line):
                    return found

    async def finish(self) -> int:
        async with asyncio.timeout(60):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def router(*flags: str):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sapwood_router", "--port", "0", "--http-port", "0",
        # The fakes share this process with the test, which may stand still for seconds.
        "--worker-silence", "60", "--tokenizer-grace", "60", *flags,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = RouterProcess(process)
    try:
        for protocol in ("gRPC", "HTTP"):
            found = await running.wait_for(rf"{protocol} listening on 127\.0\.0\.1:(\d+)")
            running.ports[protocol] = int(found[1])
        yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def fakes():
    tokenizer, worker = FakeTokenizer(), FakeWorker()
    await tokenizer.start()
    await worker.start()
    yield tokenizer, worker
    await worker.kill()
    await tokenizer.kill()


async def test_a_router_serves_and_logs_a_line_a_request(fakes) -> None:
    tokenizer, worker = fakes
    flags = ("--tokenizer", tokenizer.address, "--workers", worker.address, "--policy", "least_load")
    async with router(*flags) as running:
        base = f"http://127.0.0.1:{running.ports['HTTP']}"
        async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as http:
            async with asyncio.timeout(60):
                while (await http.get("/health")).status_code != 200:
                    await asyncio.sleep(0.02)
            response = await http.post("/v1/completions", json={"prompt": "héllo"}, headers={"x-request-id": "r-1"})
        assert response.json()["choices"][0]["text"] == "héllo"
        running.process.send_signal(signal.SIGTERM)
        assert await running.finish() == 0
        (line,) = [line for line in running.lines if "request=r-1" in line]
        assert re.search(
            rf"model=fake worker={worker.address} reason=\w+ prompt=7 cached=0 completion=7 "
            r"status=OK duration=[\d.]+ms ttft=[\d.]+ms",
            line,
        )


async def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_0(fakes) -> None:
    tokenizer, worker = fakes
    worker.script.gate, worker.script.gate_after = asyncio.Event(), 2
    async with router("--tokenizer", tokenizer.address, "--workers", worker.address) as running:
        await running.wait_for("worker .* is up")
        base = f"http://127.0.0.1:{running.ports['HTTP']}"
        async with (
            open_channel(f"127.0.0.1:{running.ports['gRPC']}") as channel,
            httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as http,
        ):
            stub = router_pb2_grpc.RouterStub(channel)
            stream = aiter(stub.Generate(router_pb2.RouterGenerateRequest(text="hello")))
            text = (await anext(stream)).text
            over_http = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "world"}))
            async with asyncio.timeout(60):
                while len(worker.calls) < 2:
                    await asyncio.sleep(0.01)
            running.process.send_signal(signal.SIGTERM)
            await running.wait_for("draining")
            async with asyncio.timeout(60):
                while (await http.get("/health")).status_code != 503:
                    await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions", json={"prompt": "new"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(router_pb2.RouterGenerateRequest(text="new")).read()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            worker.script.gate.set()
            text += "".join([response.text async for response in stream])
            assert text == "hello"
            assert (await over_http).json()["choices"][0]["text"] == "world"
        assert await running.finish() == 0


async def test_what_does_not_finish_in_time_is_cut_off(fakes) -> None:
    tokenizer, worker = fakes
    worker.script.gate, worker.script.gate_after = asyncio.Event(), 2
    flags = ("--tokenizer", tokenizer.address, "--workers", worker.address, "--drain-timeout", "0.2")
    async with router(*flags) as running:
        await running.wait_for("worker .* is up")
        async with open_channel(f"127.0.0.1:{running.ports['gRPC']}") as channel:
            stream = aiter(router_pb2_grpc.RouterStub(channel).Generate(router_pb2.RouterGenerateRequest(text="hello")))
            await anext(stream)
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in stream:
                    pass
            assert await running.finish() == 0
    async with asyncio.timeout(60):
        await worker.calls[0].over.wait()
    assert worker.calls[0].outcome == "cancelled"


async def test_a_port_in_use_is_one_line_and_exit_2(fakes) -> None:
    tokenizer, _ = fakes
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sapwood_router", "--port", "0", "--http-port", str(tokenizer.port),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert str(tokenizer.port) in stderr.decode().splitlines()[-1]


async def test_help_names_every_flag_with_its_variable_and_default() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sapwood_router", "--help", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    text = out.decode()
    for name in ("workers", "policy", "cache-index-bytes", "http-port", "tokenizer-grace", "drain-timeout"):
        assert f"--{name}" in text
        assert f"SAPWOOD_ROUTER_{name.replace('-', '_').upper()}" in text
