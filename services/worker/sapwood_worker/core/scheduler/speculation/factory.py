"""Makes what plans drafts, as a scheduler's configuration asks for it."""

from __future__ import annotations

from functools import partial

from sapwood_worker.core.cache.page_allocator import PageAllocator
from sapwood_worker.core.cache.page_table import PageTable
from sapwood_worker.core.cache.prefix_cache import PrefixCache
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.speculation.draft_pages import DraftPages
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel, ModelDrafter
from sapwood_worker.core.scheduler.speculation.prefix_drafter import PrefixDrafter
from sapwood_worker.core.scheduler.speculation.speculation import FEWEST_POSITIONS, Speculation
from sapwood_worker.core.scheduler.speculation.step_costs import StepCosts


def make_speculation(
    config: SchedulerConfig,
    drafter: Drafter | DraftModel | None,
    cache: PrefixCache,
    running: RunningBatch,
    table: PageTable,
    ledger: PageAllocator,
) -> Speculation | None:
    """What plans the drafts of a scheduler's steps; None: nothing is drafted.

    Args:
        config: The scheduler's.
        drafter: Makes the drafts, or the model that does; None: they are made from the prefix cache and what a request holds.
        cache: The prefix cache.
        running: The running requests.
        table: The page table.
        ledger: Whose pages stand in it.
    """
    alone = drafter is None and config.speculate == "auto"
    if config.speculate == "off" or (alone and config.lanes > 1):  # a draft takes the lanes away, which bring more
        return None
    if drafter is None:
        drafter = PrefixDrafter(lambda request: cache.continuation(request.slot, request.token_ids))
    elif isinstance(drafter, DraftModel):
        drafter = ModelDrafter(drafter, DraftPages(table, ledger, config.page_size))
    positions = min(max(config.max_running, FEWEST_POSITIONS), config.max_step_tokens)
    costs = StepCosts() if config.speculate == "auto" else None
    room = partial(running.draftable, further=drafter.computes)
    return Speculation(drafter, positions, costs, room)
