"""Requests that come at once, before any of them is answered: nobody gets much more to do than the others."""

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.served_model import ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.routing.index.blocks import BlockIndex
from sapwood_router.routing.index.prefixes import HotPrefixes, PrefixIndex
from sapwood_router.routing.policies.base import REQUEST_TOKENS, Policy, PromptPages
from sapwood_router.routing.policies.cache_aware import CacheAware
from sapwood_router.routing.policies.least_load import LeastLoad


def cache_aware() -> CacheAware:
    return CacheAware(PrefixIndex(1 << 24, time.monotonic), BlockIndex(1 << 24), HotPrefixes(time.monotonic))


def work_given(policy: Policy, lengths: list[int], workers: int) -> list[int]:
    """Prompt tokens and answers, in tokens, that each worker gets of new prompts of such lengths."""
    fleet = [Worker(f"w{at}", CircuitBreaker(BreakerSettings(), lambda: 0.0), lambda: 0.0) for at in range(workers)]
    for worker in fleet:
        worker.model = ServedModel("m", 1 << 20, 1000, 16, 1 << 20, 1)
    given = dict.fromkeys((worker.address for worker in fleet), 0)
    for number, length in enumerate(lengths):
        prompt = PromptPages(range(number << 16, (number << 16) + length))
        chosen = policy.choose([worker.view() for worker in fleet], prompt).address
        policy.placed(chosen, 16, prompt)
        next(worker for worker in fleet if worker.address == chosen).lease(length)
        given[chosen] += length + REQUEST_TOKENS
    return list(given.values())


@pytest.mark.parametrize("policy", [cache_aware, LeastLoad])
@given(lengths=st.lists(st.integers(1, 3000) | st.sampled_from([1, 20_000]), max_size=40), workers=st.integers(1, 5))
def test_the_busiest_worker_has_less_than_one_request_more_than_the_mean(
    policy: Callable[[], Policy], lengths: list[int], workers: int
) -> None:
    given = work_given(policy(), lengths, workers)
    largest = max(lengths, default=0) + REQUEST_TOKENS
    assert max(given) <= sum(given) / workers + (1 - 1 / workers) * largest  # Graham's bound of list scheduling, 1966


@pytest.mark.parametrize("policy", [cache_aware, LeastLoad])
def test_documents_between_chats_are_shared_out_and_so_are_chats(policy: Callable[[], Policy]) -> None:
    lengths = [300] * 32 + [8000] * 16
    for seed in range(10):
        random.Random(seed).shuffle(lengths)
        busy, calm = sorted(work_given(policy(), lengths, 2), reverse=True)
        assert busy <= 1.1 * calm
