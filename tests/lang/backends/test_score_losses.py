"""A tree of continuations whose client leaves, and one whose worker is killed, in real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood.async_client import AsyncClient
from sapwood.scoring import Scores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "Is it so? It is"
PATHS = [f" {number:03} times seldom, and more often it is not" for number in range(200)]
COMPUTED = "sapwood_worker_step_tokens_total"
BEGUN = 300
"""After so many computed tokens the client leaves, or the worker is killed."""


class Cluster:
    """A cluster of one worker whose metrics can be read."""

    def __init__(self, running: Any, metrics_port: int) -> None:
        self.running = running
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"

    def count(self, name: str) -> float:
        """The sum of a metric of the worker."""
        with urllib.request.urlopen(self._metrics, timeout=60) as answer:
            return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)))

    async def begun(self, asked: asyncio.Future[Scores], before: float) -> None:
        """Returns in the midst of a score."""
        while await asyncio.to_thread(self.count, COMPUTED) < before + BEGUN:
            assert not asked.done(), asked
            await asyncio.sleep(0.01)
        assert not asked.done(), asked


@pytest.fixture(scope="module")
def cluster(chatting_model: Path, start_cluster_of: Any) -> Iterator[Cluster]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    flags = ("--worker-load-format", "dummy", "--worker-num-pages", "2048", "--worker-metrics-port", str(port))
    with start_cluster_of("--model", str(chatting_model), *flags, "--workers", "1") as running:
        yield Cluster(running, port)


def test_a_score_whose_client_leaves_is_computed_no_further(cluster: Cluster) -> None:
    async def leave() -> None:
        async with AsyncClient(cluster.running.grpc) as client:
            whole = (await client.score(PATHS, PROMPT)).computed_tokens
            before = cluster.count(COMPUTED)
            asked = asyncio.ensure_future(client.score(PATHS, PROMPT))
            await cluster.begun(asked, before)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            give_up = time.monotonic() + 60
            while cluster.count("sapwood_worker_running_requests"):
                assert time.monotonic() < give_up
                await asyncio.sleep(0.05)
            assert BEGUN <= cluster.count(COMPUTED) - before < whole
            assert (await client.score(PATHS[:2], PROMPT)).scores  # the worker serves on

    asyncio.run(leave())


def test_a_score_whose_worker_is_killed_is_what_it_is_undisturbed(cluster: Cluster) -> None:
    async def kill() -> None:
        async with AsyncClient(cluster.running.grpc) as client:
            undisturbed = await client.score(PATHS, PROMPT)
            asked = asyncio.ensure_future(client.score(PATHS, PROMPT))
            await cluster.begun(asked, cluster.count(COMPUTED))
            os.kill(cluster.running.service_pid("sapwood_worker"), signal.SIGKILL)
            found = await asked
            for one, other in zip(found.scores, undisturbed.scores, strict=True):
                assert one.token_ids == other.token_ids
                assert one.logprobs == pytest.approx(other.logprobs, abs=0.02)
            cluster.running.wait_for_line("was killed by SIGKILL: it is started again")

    asyncio.run(kill())
