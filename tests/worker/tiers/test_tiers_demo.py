"""The demo model in real workers over a real store: a prefix that one has computed no other computes again.

What that saves in time ``benchmarks/bench_tiers.py`` measures; here it is counted.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.models.model_files import packaged_path

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPT = [2, *(1000 + 7 * place for place in range(1999))]
PAGES_TOKENS = 1984  # whole pages before the last token


@contextlib.contextmanager
def worker(url: str, log: Path) -> Iterator[Any]:
    """A worker's stub; at the end the worker is killed (SIGKILL)."""
    flags = ("--port", "0", "--kv-cache-gb", "0.3", "--host-cache-ratio", "1.5", "--max-step-tokens", "2048")
    storage = ("--storage", url, "--storage-prefetch", "wait_complete", "--storage-min-tokens", "16")
    command = [sys.executable, "-m", "sapwood_worker", "--model", str(packaged_path("demo-base")), *flags, *storage]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        with grpc.insecure_channel(found[1]) as channel:
            yield worker_pb2_grpc.WorkerStub(channel)
    finally:
        process.kill()
        process.wait()


def ask(stub: Any) -> tuple[list[int], int]:
    """The answer, and how many of the prompt's tokens came from the cache."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens: list[int] = []
    for response in stub.Generate(
        worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=PROMPT, sampling=sampling)
    ):
        tokens += response.token_ids
    return tokens, response.usage.cached_tokens


def stats(stub: Any) -> dict[int, Any]:
    return {each.tier: each for each in stub.GetCacheStats(worker_pb2.GetCacheStatsRequest()).tiers}


@pytest.mark.parametrize("kind", ["file", "mooncake"])
def test_a_second_and_a_restarted_worker_take_2000_tokens_from_the_store(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    url = f"file://{tmp_path}/store" if kind == "file" else request.getfixturevalue("mooncake").url
    with worker(url, tmp_path / "first") as first:
        computed, cached = ask(first)
        assert cached == 0
        while True:  # until all that the host has is in the store
            host, storage = (stats(first)[tier] for tier in (worker_pb2.CACHE_TIER_HOST, worker_pb2.CACHE_TIER_STORAGE))
            assert not storage.failures, storage.error
            if host.pages == len(PROMPT) // 16 and storage.bytes_in == host.bytes_in:
                break
            time.sleep(0.1)
        with worker(url, tmp_path / "second") as second:
            check(second, computed)
    with worker(url, tmp_path / "restarted") as restarted:
        check(restarted, computed)


def check(stub: Any, computed: list[int]) -> None:
    """A cold worker answers the same, and all that it can take from the store it does."""
    answer, cached = ask(stub)
    assert answer == computed
    tiers = stats(stub)
    assert tiers[worker_pb2.CACHE_TIER_DEVICE].hit_tokens == 0
    assert cached == tiers[worker_pb2.CACHE_TIER_STORAGE].hit_tokens == PAGES_TOKENS
    assert (tiers[worker_pb2.CACHE_TIER_STORAGE].rejected_pages, tiers[worker_pb2.CACHE_TIER_STORAGE].failures) == (
        0,
        0,
    )
