"""Layers that see a window of tokens free what nobody sees any more, and a match is the longest that they can serve, too."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_worker.core.cache.pages import PageAllocator, PageTable, WindowPages
from sapwood_worker.core.cache.prefix import PrefixCache
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.memory import plan_pages
from sapwood_worker.records.kv_layout import KVComponent, KVLayout, WindowGroup
from sapwood_worker.records.step import ModelOutput, Step

PAGE = 4
FULL = tuple(range(5, 34, 6))
GEMMA3_4B = KVLayout(
    (
        KVComponent(FULL, 2, 4, 256, "bfloat16"),
        KVComponent(tuple(set(range(34)) - set(FULL)), 2, 4, 256, "bfloat16", needed=1024),
    ),
    page_size=16,
)


# Mistral 7B v0.1: all layers see 4096 tokens.
MISTRAL_7B = KVLayout(
    (
        KVComponent((), 2, 8, 128, "bfloat16"),
        KVComponent(tuple(range(32)), 2, 8, 128, "bfloat16", needed=4096),
    ),
    page_size=16,
)


def computed(cache: PrefixCache, table: PageTable, tokens: list[int]) -> int:
    """Runs a sequence through the cache page by page; returns how many of its tokens were found there."""
    slot, known = table.open(), array("I", tokens)
    found = cache.open(slot, "r", known, b"", len(known))
    assert cache.allocate(slot, -(-len(known) // PAGE) - table.length(slot))
    for end in range(found + PAGE, len(known) + PAGE, PAGE):
        assert cache.extend(slot, min(end, len(known)), end - PAGE) >= min(end, len(known))
        cache.commit(slot, known, min(end, len(known)))
        cache.check()
    cache.close(slot)
    table.close(slot)
    cache.check()
    return found


def test_a_prefix_is_found_up_to_where_its_window_is_there_still() -> None:
    table = PageTable(4, 64)
    cache = PrefixCache(PageAllocator(64), table, PAGE, windows=(WindowGroup(reach=8, num_pages=8),))
    long = list(range(100, 165))
    assert computed(cache, table, long) == 0
    assert computed(cache, table, long) == 64, "the end of what was computed last has its window"
    assert computed(cache, table, [*long[:32], 1, 2, 3]) == 0, "in its middle nothing of the window is left"
    assert computed(cache, table, [*long[:32], 4, 5, 6]) == 32, "where others branch it is kept"
    assert cache.windows[0].num_freed == 20


@settings(max_examples=200, deadline=None)
@given(lost=st.lists(st.booleans(), max_size=12), reach=st.integers(0, 20))
def test_what_is_usable_is_the_longest_prefix_whose_last_tokens_are_there(lost: list[bool], reach: int) -> None:
    window = WindowPages(WindowGroup(reach, 16), PAGE, 16, 2, 16, lambda pages: None)
    window._beside[: len(lost)] = np.where(lost, -1, np.arange(len(lost)))
    there = {at for page, gone in enumerate(lost) if not gone for at in range(page * PAGE, page * PAGE + PAGE)}
    seen = [all(at in there for at in range(max(0, end * PAGE - reach), end * PAGE)) for end in range(len(lost) + 1)]
    assert window.usable(np.arange(len(lost), dtype=np.int32)) == max(
        end for end, all_seen in enumerate(seen) if all_seen
    )


def running_at_once(counts: tuple[int, ...], length: int, reach: int = 1023) -> int:
    """How many requests of so many tokens run at once, all of their tokens in the cache."""
    windows = tuple(WindowGroup(reach, count) for count in counts[1:])
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=16, num_pages=counts[0], context_length=1 << 17, max_running=64, max_step_tokens=8192,
            conservativeness=0.0, windows=windows,
        )
    )  # fmt: skip
    for serial in range(40):
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        scheduler.add(Request(serial, str(serial), [serial + 1] * (length - 200), sampling))
    most = 0
    while scheduler.num_retractions == 0 and (step := scheduler.schedule()):
        scheduler.update(_sampled(step))
        decodes = int((step.samples > 0).sum())
        if decodes == len(step.rows):
            most = max(most, decodes)
        if int(step.starts.max()) > length:
            break
    return most


def _sampled(step: Step) -> ModelOutput:
    return ModelOutput(step.number, [[7] * samples for samples in step.samples.tolist()])


def test_gemma_3_takes_four_times_the_requests_of_32k_in_the_same_memory() -> None:
    memory = 32 << 30
    even = (memory // GEMMA3_4B.page_bytes,)
    counts = plan_pages(GEMMA3_4B, None, memory, 64, 8192)
    assert counts[0] * GEMMA3_4B.group_bytes(0) + counts[1] * GEMMA3_4B.group_bytes(1) <= memory
    before, now = running_at_once(even, 32_000), running_at_once(counts, 32_000)
    assert before >= 5 and now >= 4 * before, f"{now} and {before}"


def test_a_model_whose_layers_all_have_windows_takes_four_times_the_requests_of_32k() -> None:
    memory = 32 << 30
    counts = plan_pages(MISTRAL_7B, None, memory, 64, 8192)
    assert counts[1] == memory // MISTRAL_7B.page_bytes and counts[0] == 16 * counts[1]
    before, now = running_at_once(counts[1:], 32_000), running_at_once(counts, 32_000, 4095)
    assert before >= 5 and now >= 4 * before, f"{now} and {before}"
    assert plan_pages(MISTRAL_7B, None, memory, 64, 8192, alone=False) == (counts[1], counts[1])


def test_memory_for_all_windows_is_set_aside_where_it_leaves_enough() -> None:
    plenty, little = (plan_pages(GEMMA3_4B, None, size << 30, 16, 2048) for size in (100, 1))
    assert plenty[1] == 16 * WindowGroup(1023, 0).least(16) + 2 * 128
    assert little[0] > 8 * little[1] >= 8 * WindowGroup(1023, 0).least(16)
    assert plan_pages(GEMMA3_4B, 50, 0, 64, 8192) == (50, 50), "never more than the others have"
    with pytest.raises(ConfigError, match="layers that see 1024 tokens"):
        plan_pages(GEMMA3_4B, None, 20 << 20, 64, 8192)
