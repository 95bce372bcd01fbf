"""The demo model's answers from every tier, under every policy, with every page size and every store, and recomputation.

The weights are loaded once; each combination has tiers of its own. The device has room for one document, not for two, so what is
asked in turns comes from the device (L1), then from the host (L2), and, once both have been emptied, from the store (L3).
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import packaged_path
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.storage.mooncake_cluster import MooncakeCluster, mooncake_is_installed
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.cache.storage.opener import StorageFacts, open_connection
from sapwood_worker.core.cache.storage.store_factory import parse_storage
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

pytestmark = [pytest.mark.slow, pytest.mark.model]

DOCUMENT = 130
POOL_TOKENS = 192
COUNT = 3
DOCUMENTS = [[2, *((1000 + 37 * place + 131 * index) % 200_000 for place in range(DOCUMENT - 1))] for index in range(2)]
FIRST, AGAIN, OTHER = ([*DOCUMENTS[index], *question] for index, question in ((0, [9, 8]), (0, [7, 6]), (1, [5, 4])))

POLICIES = ["write_through", "write_through_selective", "write_back"]
STORES = ["file", "mooncake", "nixl"]
COMBINATIONS = [
    *itertools.product([1, 16, 64], POLICIES, STORES, ["wait_complete"]),
    *itertools.product([16], POLICIES, STORES, ["best_effort"]),
]


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[int], ModelRunner]]:
    """A runner by its page size; all share the weights."""
    torch.set_num_threads(1)
    loaded = load_model(
        packaged_path("demo-base"), "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0
    )
    made: dict[int, ModelRunner] = {}

    def make(page_size: int) -> ModelRunner:
        if page_size not in made:
            options = RunnerOptions(
                model_path=packaged_path("demo-base"),
                page_size=page_size,
                num_pages=POOL_TOKENS // page_size,
                max_running=2,
                host_cache_ratio=4.0,
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sapwood_worker.model.runner.builder.load_model", lambda *_, **__: loaded)
                made[page_size] = build_runner(options)
        return made[page_size]

    yield make


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    if not mooncake_is_installed():
        pytest.skip("Mooncake is not installed")
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake"), lend_bytes=256 << 20) as running:
        yield running


def ask(runner: ModelRunner, scheduler: Scheduler, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0.7, seed=prompt[-1], max_tokens=COUNT, ignore_eos=True)
    scheduler.add(Request(0, "r", array("I", prompt), sampling))
    tokens: list[int] = []
    while scheduler.has_work:
        planned = scheduler.schedule()
        if not planned:
            scheduler.wait_for_storage(0.01)
            continue
        for output in scheduler.update(runner.execute(planned)):
            tokens += output.token_ids
        scheduler.check()
    return tokens


def settle(runner: ModelRunner, scheduler: Scheduler) -> None:
    """Waits until all that is to be copied or stored is."""
    while scheduler.has_copies:
        planned = scheduler.schedule()
        if planned:
            scheduler.update(runner.execute(planned))
        scheduler.wait_for_storage(0.01)


def make_scheduler(runner: ModelRunner, tiers: HierarchicalCache | None) -> Scheduler:
    settings = {"context_length": POOL_TOKENS, "max_step_tokens": 256, "conservativeness": 0.0}
    return scheduler_for(runner.info, tiers, prefix_cache=tiers is not None, **settings)


@pytest.fixture(scope="module")
def recomputed(runner_of: Callable[[int], ModelRunner]) -> list[list[int]]:
    """The answers without any cache."""
    return [ask(runner_of(16), make_scheduler(runner_of(16), None), prompt) for prompt in (FIRST, AGAIN, OTHER)]


@pytest.fixture(scope="module")
def identity(runner_of: Callable[[int], ModelRunner]) -> str:
    """The model's; takes a while."""
    return runner_of(16).cache_identity()


@pytest.mark.parametrize(
    ("page_size", "policy", "kind", "prefetch"), COMBINATIONS, ids=lambda each: str(each).replace("_", "-")
)
def test_answers_from_every_tier_equal_recomputation(
    runner_of: Callable[[int], ModelRunner],
    recomputed: list[list[int]],
    identity: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    page_size: int,
    policy: Any,
    kind: str,
    prefetch: Any,
) -> None:
    if kind == "nixl" and importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed")
    urls = {"file": f"file://{tmp_path}", "nixl": f"nixl://posix{tmp_path}"}
    connect = parse_storage(urls[kind]) if kind in urls else request.getfixturevalue("cluster").connect
    runner, pages = runner_of(page_size), DOCUMENT // page_size
    first, again, other = recomputed
    pool = runner.host_pool
    assert pool is not None
    pool.records[:] = 255  # not a number: what is read before it was written spoils the answer
    host = HostPages(pool.num_pages)
    storage = StorageTier(host, pool, page_size, PrefetchOptions(policy=prefetch, share=1.0), time.monotonic)
    own_name = f"{identity} {request.node.name}"  # Mooncake's objects outlive the test
    facts = StorageFacts(pool, page_size, lambda: own_name, 1.0, min_tokens=1)
    storage.attach(open_connection(connect(), facts, time.monotonic))
    tiers = HierarchicalCache(host, runner.info.num_pages, page_size, policy, storage)
    scheduler = make_scheduler(runner, tiers)
    found = tiers.counters

    assert ask(runner, scheduler, FIRST) == first
    assert (found.device_hits, found.host_hits) == (0, 0)
    assert ask(runner, scheduler, AGAIN) == again
    assert found.device_hits >= pages, "L1"
    settle(runner, scheduler)
    assert ask(runner, scheduler, OTHER) == other
    assert ask(runner, scheduler, AGAIN) == again
    assert found.host_hits > 0 and found.device_hits + found.host_hits >= 2 * pages, "L2"
    for _ in range(2):  # what write_back evicts goes down first
        scheduler.clear_device()
        settle(runner, scheduler)
        host.clear()
    found.device_hits = found.host_hits = 0
    assert ask(runner, scheduler, FIRST) == first
    settle(runner, scheduler)
    counters = storage.counters
    assert (counters.rejected, counters.missing, counters.dropped) == (0, 0, 0)
    if prefetch == "wait_complete":
        assert counters.fetched == found.host_hits >= pages, "L3"
    scheduler.check_idle()
    storage.detach()
    while storage.busy:
        storage.poll()
