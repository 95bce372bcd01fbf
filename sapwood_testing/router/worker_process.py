"""Real worker processes around a runner without a model, and a load on a router in front of them."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sapwood.v1 import router_pb2
from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.namespace import Namespace
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.fake_runner import continuation

VOCAB = 131
"""The fake tokenizer reads each token as an ASCII character."""
LENGTH = 60
"""Tokens of each answer."""


class WorkerProcess:
    """One that can be killed and started again on its port.

    Args:
        namespace: The network it is in; None for this machine's own.
        flags: Further flags.

    Attributes:
        process: The one that speaks gRPC.
        start_seconds: The most that a start may take.
    """

    process: asyncio.subprocess.Process
    start_seconds = 60.0

    def __init__(self, namespace: Namespace | None = None, flags: Sequence[str] = ()) -> None:
        self.port = port_of_its_own()
        self.flags = flags
        self._started = False
        self._rest: asyncio.Future[bytes] | None = None
        self.namespace = namespace
        self.host = "127.0.0.1" if namespace is None else namespace.host

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.host}:{self.port}"

    def command(self) -> Sequence[str]:
        """The module that it runs, and flags."""
        fake = ("--vocab-size", str(VOCAB), "--step-ms", "10", "--context-length", "512")
        return ("sapwood_testing.worker.fake_worker", "--metrics-port", "0", *fake)

    async def start(self) -> None:
        """Starts it, on the port it had before; returns once it listens."""
        self.process = await asyncio.create_subprocess_exec(
            *(() if self.namespace is None else ("ip", "netns", "exec", self.namespace.name)),
            *(sys.executable, "-m", *self.command(), "--port", str(self.port), "--host", self.host, *self.flags),
            stderr=asyncio.subprocess.PIPE,
        )
        self._started = True
        assert self.process.stderr is not None
        async with asyncio.timeout(self.start_seconds):
            while line := (await self.process.stderr.readline()).decode():
                if found := re.search(r"listening on \S+:(\d+)", line):
                    self.port = int(found[1])
                    self._rest = asyncio.ensure_future(self.process.stderr.read())
                    return
        raise AssertionError("the worker did not start")

    def send(self, number: signal.Signals) -> None:
        """To the process that speaks gRPC."""
        self.process.send_signal(number)

    def send_to_scheduler(self, number: signal.Signals) -> None:
        """To the process behind the one that speaks gRPC."""
        os.kill(self.ranks()[0], number)

    def ranks(self) -> list[int]:
        """The processes behind the one that speaks gRPC, in the order of their ranks."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def kill(self) -> None:
        """Kills it, if it runs."""
        if self._started and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
            if self._rest is not None:
                await self._rest


class Load:
    """Streams requests without a pause and checks each answer.

    Args:
        stub: The router's.
        streams: Requests at a time.
        seed: Of the prompts.
        prompts: What is asked, over and over; none: anything.

    Attributes:
        done: Answers.
        resumed: How often one of them continued on another worker.
        accepted: Tokens of theirs that were drafted.
    """

    def __init__(self, stub: Any, streams: int, seed: int, prompts: Sequence[list[int]] = ()) -> None:
        self._stub = stub
        self._prompts = prompts
        self._rng = random.Random(seed)
        self._tasks = [asyncio.ensure_future(self._run()) for _ in range(streams)]
        self._stopping = False
        self.done = self.resumed = self.accepted = 0

    async def stop(self) -> None:
        """Waits for those that run."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raises what ended a stream."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _run(self) -> None:
        while not self._stopping:
            prompt = [self._rng.randrange(3, VOCAB) for _ in range(self._rng.randrange(1, 60))]
            if self._prompts:
                prompt = self._rng.choice(self._prompts)
            request = router_pb2.RouterGenerateRequest()
            request.tokens.ids.extend(prompt)
            request.sampling.seed, request.sampling.max_tokens = 7, LENGTH
            call = self._stub.Generate(request, timeout=300)  # it ends what hangs, however busy the machine is
            tokens: list[int] = []
            async for response in call:
                tokens += response.token_ids
            assert tokens == list(islice(continuation(prompt, SamplingParams(seed=7), VOCAB), LENGTH))
            assert response.usage.completion_tokens == LENGTH
            assert response.usage.prompt_tokens == len(prompt)
            self.done += 1
            self.accepted += response.usage.accepted_prediction_tokens
            self.resumed += int(dict(await call.trailing_metadata())["x-sapwood-resumptions"])
