"""Worker processes without a model, of which some compute prompts and others generate, and a router in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice
from typing import Any

from sapwood.v1 import router_pb2, router_pb2_grpc, worker_pb2
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.network.channel import open_channel
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.fake_tokenizer import FakeTokenizer
from sapwood_testing.router.worker_process import VOCAB, WorkerProcess
from sapwood_testing.worker.fake_runner import continuation

PAGE = 16
ROLES = {
    worker_pb2.WORKER_ROLE_BOTH: "both",
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
}
_prompts = itertools.count()


def new_prompt() -> list[int]:
    """One that no worker has seen."""
    number = next(_prompts)
    return [3 + (number * 37 + place * (place + number)) % 120 for place in range(70 + number % 20)]


class Worker(WorkerProcess):
    """A worker of a role, with its counters."""

    def __init__(self, role: str, *flags: str) -> None:
        self.metrics = port_of_its_own()
        super().__init__(flags=("--role", role, "--metrics-port", str(self.metrics), *flags))

    async def count(self, name: str) -> float:
        return (await self.counts(name))[0]

    async def counts(self, *names: str) -> list[float]:
        # A client of HTTP takes longer than what is timed by these counters.
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.metrics)
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = (await reader.read()).decode()
            writer.close()
        found = [re.search(rf"^sapwood_worker_{name}(?:_total)? (\S+)$", text, re.MULTILINE) for name in names]
        return [float(each[1]) for each in found if each is not None]

    async def reaches(self, name: str, met: Callable[[float], bool]) -> None:
        """Waits until a counter is as wanted."""
        async with asyncio.timeout(60):
            while not met(await self.count(name)):  # noqa: ASYNC110 - another process counts
                await asyncio.sleep(0.05)


class Front:
    """A router in front of some of the workers."""

    def __init__(self, router: RouterApplication, stub: Any) -> None:
        self.router, self.stub = router, stub

    def request(self, prompt: Sequence[int], max_tokens: int = 20, **sampling: Any) -> router_pb2.RouterGenerateRequest:
        request = router_pb2.RouterGenerateRequest()
        request.tokens.ids.extend(prompt)
        request.sampling.seed, request.sampling.max_tokens = 7, max_tokens
        for name, value in sampling.items():
            setattr(request.sampling, name, value)
        return request

    def stream(self, prompt: Sequence[int], max_tokens: int = 20, **sampling: Any) -> Any:
        return self.stub.Generate(self.request(prompt, max_tokens, **sampling), timeout=120)

    async def answer(self, prompt: Sequence[int], max_tokens: int = 20, **sampling: Any) -> list[Any]:
        return [response async for response in self.stream(prompt, max_tokens, **sampling)]

    async def explain(self, prompt: Sequence[int]) -> router_pb2.ExplainRouteResponse:
        asked = router_pb2.ExplainRouteRequest()
        asked.request.tokens.ids.extend(prompt)
        explained: router_pb2.ExplainRouteResponse = await self.stub.ExplainRoute(asked)
        return explained

    def count(self, name: str) -> float:
        return self.router._metrics.registry.get_sample_value(f"sapwood_router_{name}_total") or 0

    async def available(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.router.registry.available("fake")) != count:  # noqa: ASYNC110 - the registry tells nobody
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def front(workers: Sequence[Worker], **settings: Any) -> AsyncIterator[Front]:
    """A router that hands prompts off wherever it can, once it knows all the workers; ``settings`` are its configuration's."""
    tokenizer = FakeTokenizer()
    await tokenizer.start()
    # A worker that gets little of a core is silent for seconds: only where silence is the loss it counts.
    settings = {"worker_silence": 60, "resume_grace": 60, "queue_wait": 120, "most_resumptions": 50, **settings}
    settings = {"disaggregate": "always", **settings}
    addresses = tuple(worker.address for worker in workers)
    router = RouterApplication(
        RouterConfig(port=0, http_port=0, tokenizer=tokenizer.address, workers=addresses, **settings)
    )
    await router.start()
    channel = open_channel(f"127.0.0.1:{router.grpc_port}")
    running = Front(router, router_pb2_grpc.RouterStub(channel))
    try:
        await running.available(len(workers))
        yield running
    finally:
        await channel.close()
        await router.stop()
        await tokenizer.kill()


@contextlib.asynccontextmanager
async def started(*workers: Worker) -> AsyncIterator[None]:
    """Starts workers, and kills them in the end."""
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        yield
    finally:
        for worker in workers:
            await worker.kill()


def expected(prompt: Sequence[int], count: int = 20) -> list[int]:
    """The tokens that any worker gives for a prompt with seed 7."""
    return list(islice(continuation(prompt, SamplingParams(seed=7), VOCAB), count))


def tokens_of(answer: Sequence[Any]) -> list[int]:
    """The tokens of an answer's responses."""
    return [token for response in answer for token in response.token_ids]
