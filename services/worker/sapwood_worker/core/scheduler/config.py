"""The configuration of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sapwood_worker.core.cache.eviction import EvictionName
from sapwood_worker.core.scheduler.waiting import PolicyName
from sapwood_worker.records.kv_layout import StateSlots, WindowGroup

SpeculateName = Literal["auto", "off", "prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits, the model's facts and the choices.

    Attributes:
        page_size: Tokens in a page.
        num_pages: Pages in the pool.
        context_length: Most tokens of prompt and output together.
        eos_token_ids: The model's end tokens.
        max_running: Most requests in a batch.
        max_waiting: Most requests in the queue.
        max_step_tokens: Token budget of a step; a decode counts one. Prefill always gets at least one token.
        step_seconds: How long a step with decodes should last (``batch.py``); 0: any time.
        policy: Order of admission.
        starved_after: After this many steps of waiting, no other request overtakes a request.
        prefix_cache: Whether finished work is kept for requests to come.
        eviction: Which cached prefix is evicted first when room is needed.
        kv_events: Whether to note what the prefix cache stores and removes; :meth:`Scheduler.take_kv_events` must then be
            called after each step.
        whole_prompts: Whether a prompt must be computed in one step, however long it is.
        whole_pictures: Whether each of a prompt's pictures must be.
        picture_tokens: Tokens of pictures that a step may begin with, and so encode: others wait for the next step. One picture
            is always begun.
        jump_forward: Whether a token that a grammar forces is appended without running the model for it.
        windows: For each kind of sliding-window layers, its pages.
        states: The slots for snapshots of states; None: no layer keeps a state. If one does, nothing is drafted: a state cannot
            go back.
        speculate: Whether to draft tokens: never (off), if drafts pay by the measured time of steps (auto), or
            wherever text repeats earlier text (prefix).
        micro_batches: The most steps in flight at once; each step has other requests (with ``chained`` one step more). 1:
            :meth:`Scheduler.plans_ahead` decides.
        micro_batches_from: The least number of running requests that are divided over the micro-batches, if ``chained``.
        chained: Whether, with micro-batches, a step may compute a token that only the device knows yet.
        lora_slots: Adapters that the device holds at once.
        conservativeness: Factor on the pages that admission reserves for tokens that running requests are expected to generate.
    """

    page_size: int
    num_pages: int
    context_length: int
    eos_token_ids: frozenset[int] = frozenset()
    max_running: int = 64
    max_waiting: int = 1024
    max_step_tokens: int = 512
    step_seconds: float = 0.0
    policy: PolicyName = "fcfs"
    starved_after: int = 1024
    prefix_cache: bool = True
    eviction: EvictionName = "lru"
    kv_events: bool = False
    conservativeness: float = 1.0
    whole_prompts: bool = False
    whole_pictures: bool = False
    picture_tokens: int = 1 << 20
    jump_forward: bool = True
    speculate: SpeculateName = "off"
    windows: tuple[WindowGroup, ...] = ()
    states: StateSlots | None = None
    micro_batches: int = 1
    micro_batches_from: int = 1
    chained: bool = False
    lora_slots: int = 0
