"""Makes what plans drafts, as a scheduler's configuration asks for it."""

from __future__ import annotations

from sapwood_worker.core.cache.prefix_cache import PrefixCache
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.core.scheduler.speculation.prefix_drafter import PrefixDrafter
from sapwood_worker.core.scheduler.speculation.speculation import FEWEST_POSITIONS, Speculation
from sapwood_worker.core.scheduler.speculation.step_costs import StepCosts


def make_speculation(
    config: SchedulerConfig, drafter: Drafter | None, cache: PrefixCache, running: RunningBatch
) -> Speculation | None:
    """What plans the drafts of a scheduler's steps; None: nothing is drafted.

    Args:
        config: The scheduler's.
        drafter: Makes the drafts; None: from the prefix cache and what a request holds itself.
        cache: The prefix cache.
        running: The running requests.
    """
    if config.speculate == "off":
        return None
    if drafter is None:
        drafter = PrefixDrafter(lambda request: cache.continuation(request.slot, request.token_ids))
    positions = min(max(config.max_running, FEWEST_POSITIONS), config.max_step_tokens)
    costs = StepCosts() if config.speculate == "auto" else None
    return Speculation(drafter, positions, costs, running.draftable)
