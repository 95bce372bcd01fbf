"""What the scheduler reports: its load, how long steps took, and the tiers of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import msgspec


class RankLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of a rank that has requests of its own.

    Attributes:
        requests: Requests that it has got so far.
        running: Those that run now.
        step_tokens: The time of one of its steps, expressed as the number of tokens that could be computed in that time.
    """

    requests: int
    running: int
    step_tokens: float


class LoraUse(msgspec.Struct, frozen=True, array_like=True):
    """The requests with an adapter that have not ended: its number, how many run, and how many wait."""

    number: int
    running: int
    waiting: int


class LoraLoads(msgspec.Struct, frozen=True, array_like=True):
    """The adapters of a scheduler.

    Attributes:
        slots: The adapter in each slot of the device; 0: none.
        unused: Slots that no running request uses.
        uses: The requests of each adapter that has any.
        loads: How often an adapter was put into a slot so far.
        claims: How often a slot was taken from an adapter whose requests still ran so far.
    """

    slots: tuple[int, ...]
    unused: int
    uses: tuple[LoraUse, ...] = ()
    loads: int = 0
    claims: int = 0


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A snapshot of the scheduler's load.

    Attributes:
        running_requests: Requests with a row in the page table.
        waiting_requests: Requests in the queue.
        queued_tokens: Tokens still to prefill over all of them.
        running_tokens: Tokens of the running requests that are computed, the steps in flight included.
        used_pages: Pages held by requests or by the prefix cache.
        evictable_pages: How many of these only the prefix cache holds.
        num_pages: Pages in the pool.
        window_pages: Pages of layers that see a window of tokens only.
        used_window_pages: How many of these requests or the prefix cache hold.
        passed_window_pages: Pages that have slid out of the windows of running requests so far.
        state_slots: Slots for snapshots of states.
        used_state_slots: How many of these running requests or the prefix cache hold.
        evicted_states: Snapshots that have given way to others so far.
        part_page_tokens: Tokens that requests got as copies of the beginnings of cached pages, at each start of a request.
        prefix_page_tokens: Of a model with states, tokens of prefixes whose pages were cached, at each start of a request.
        prefix_state_tokens: How many of these a cached state covered too, so that they were not computed.
        prompt_tokens: Prompt tokens of all requests that have run so far.
        cached_tokens: How many of these were found in the prefix cache.
        device_hit_tokens: Tokens found in its first tier at each start of a request; a retracted request starts again.
        host_hit_tokens: Tokens found in its second tier and not in the first.
        storage_hit_tokens: Tokens fetched from its third tier into the second.
        host_used_pages: Pages of the second tier that hold something.
        forced_tokens: Tokens of output that a grammar forced and no step sampled.
        drafted_tokens: Tokens that were drafted and checked in a step.
        accepted_tokens: How many of these the model chose too.
        host_num_pages: Pages of the second tier; 0: there is none.
        store_read_bytes: Bytes read from the third tier that passed their check.
        store_written_bytes: Bytes written to the store, or found there already.
        store_failures: Calls to it that failed or took too long.
        store_rejected_pages: Pages read from the store that failed their check.
        store_dropped_pages: Pages that were not written to it.
        store_timeouts: Requests that stopped waiting for the store before all their pages were there.
        handoff_tickets: Prompts offered to other workers in KV transfers.
        handoff_renewals: How many leases of KV transfers were renewed.
        handoff_expired: Leases that ended because nobody renewed them.
        handoff_pages: Pages of the second tier that leases pin now.
        pulled_pages: Pages read from other workers in KV transfers.
        pulled_bytes: Their content, in bytes.
        pulled_early_bytes: How many of these bytes arrived while the other worker still computed the rest of the prompt.
        pulled_part_bytes: Bytes of pages that arrived while the other worker still computed the pages' last layers.
        pull_failures: Reads that failed.
        pull_stale_pages: Pages that the source no longer had, or that failed their check.
        pull_fallbacks: Requests that had to compute pages for which they had a ticket.
        storage_id: The name of the third tier's store, equal for all workers that share it; empty: there is none, or nothing is
            read from it.
        drafts: How many drafts of requests' next tokens were checked, of any length.
        drafter: What makes them; empty: nothing does.
        ranks: The loads of the ranks, with data-parallel attention; empty: all ranks run all requests.
        loras: Its adapters; None: it serves none.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    used_pages: int = 0
    evictable_pages: int = 0
    num_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    host_used_pages: int = 0
    host_num_pages: int = 0
    forced_tokens: int = 0
    store_read_bytes: int = 0
    store_written_bytes: int = 0
    store_failures: int = 0
    store_rejected_pages: int = 0
    store_dropped_pages: int = 0
    store_timeouts: int = 0
    storage_id: str = ""
    running_tokens: int = 0
    window_pages: int = 0
    used_window_pages: int = 0
    passed_window_pages: int = 0
    state_slots: int = 0
    used_state_slots: int = 0
    evicted_states: int = 0
    part_page_tokens: int = 0
    prefix_page_tokens: int = 0
    prefix_state_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    handoff_tickets: int = 0
    handoff_renewals: int = 0
    handoff_expired: int = 0
    handoff_pages: int = 0
    pulled_pages: int = 0
    pulled_bytes: int = 0
    pull_failures: int = 0
    pull_stale_pages: int = 0
    pull_fallbacks: int = 0
    drafts: int = 0
    drafter: str = ""
    pulled_early_bytes: int = 0
    pulled_part_bytes: int = 0
    ranks: tuple[RankLoad, ...] = ()
    loras: LoraLoads | None = None


def sum_loads(loads: Sequence[Load], ranks: tuple[RankLoad, ...]) -> Load:
    """The load of all ranks together, from the load of each; names come from the first rank."""
    first = msgspec.structs.asdict(loads[0])
    sums = {name: sum(getattr(load, name) for load in loads) for name, value in first.items() if isinstance(value, int)}
    loras = _sum_loras([load.loras for load in loads if load.loras is not None])
    return msgspec.structs.replace(loads[0], **sums, ranks=ranks, loras=loras)


def _sum_loras(loads: Sequence[LoraLoads]) -> LoraLoads | None:
    """The adapters of all ranks together: a slot of each rank holds an adapter of its own."""
    if not loads:
        return None
    uses: dict[int, tuple[int, int]] = {}
    for each in chain.from_iterable(load.uses for load in loads):
        running, waiting = uses.get(each.number, (0, 0))
        uses[each.number] = running + each.running, waiting + each.waiting
    return LoraLoads(
        tuple(chain.from_iterable(load.slots for load in loads)),
        sum(load.unused for load in loads),
        tuple(LoraUse(number, *counts) for number, counts in uses.items()),
        sum(load.loads for load in loads),
        sum(load.claims for load in loads),
    )


# How long a step took and what its requests waited for, as reported to the front.


class LoadTime(msgspec.Struct, frozen=True, array_like=True):
    """What a request got from a tier of the cache below the device.

    Attributes:
        serial: The request.
        tier: ``storage``: read from the store while the request queued; ``host``: copied to the device with its first step.
        pages: How many pages.
        began: When it began, in seconds of ``time.monotonic``.
        ended: Seconds on the same clock.
    """

    serial: int
    tier: Literal["storage", "host"]
    pages: int
    began: float
    ended: float


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    Attributes:
        seconds: Seconds from its plan to its tokens.
        prefill_tokens: Prompt tokens computed.
        decode_tokens: Requests that decoded a token.
        started: Serials of the requests whose first step it was.
        at: When it was planned, in seconds on ``time.monotonic``'s clock, which all processes of a machine share.
        loads: The pages that requests starting with this step got from the cache's lower tiers.
        spared_tokens: Cached tokens that each layer did not read again, because another request of the step shares them.
    """

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    started: list[int]
    at: float
    loads: list[LoadTime] = []
    spared_tokens: int = 0


# Statistics of the KV cache's tiers, for operators.


TierName = Literal["device", "host", "storage"]


class TierReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tier. All counts begin at the worker's start.

    Attributes:
        tier: The tier's name.
        pages: Pages that hold something.
        capacity: Pages there are; 0 for a store, which says neither.
        hit_tokens: Tokens that requests found in this tier and in no tier above it; for a store, tokens read from it.
        bytes_in: Bytes written to it.
        bytes_out: Bytes read from it.
        seconds_in: Seconds that writing took, summed over copies or calls.
        seconds_out: Seconds that reading took, summed likewise.
        failures: Copies or calls that failed.
        dropped_pages: Pages that should have been written to it, but were not.
        rejected_pages: Pages that were read from it, but failed their check.
        url: A store's URL.
        state: A store's state: ``attached``, ``opening``, ``failing`` (left alone for a while), or ``none``.
        error: A store's last error.
    """

    tier: TierName
    pages: int = 0
    capacity: int = 0
    hit_tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0
    seconds_out: float = 0.0
    failures: int = 0
    dropped_pages: int = 0
    rejected_pages: int = 0
    url: str = ""
    state: str = ""
    error: str = ""
