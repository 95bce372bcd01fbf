"""A scheduler as a worker makes it for its model."""

from __future__ import annotations

from typing import Any

from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.records.model_info import ModelInfo


def scheduler_for(
    info: ModelInfo,
    tiers: HierarchicalCache | None = None,
    *,
    masks: TokenMasks | None = None,
    drafter: Drafter | DraftModel | None = None,
    **settings: Any,
) -> Scheduler:
    """A scheduler for one model.

    Args:
        info: What the model's runner says: its pages, windows, micro_batches and limits are the scheduler's.
        tiers: What holds pages below the device's.
        masks: Makes grammar masks; None: no request has a grammar.
        drafter: What drafts tokens, if ``settings`` has ``speculate``.
        settings: Of :class:`SchedulerConfig`, instead of the model's or the defaults.
    """
    of_model = {
        "windows": info.windows,
        "states": info.states,
        "page_size": info.page_size,
        "num_pages": info.num_pages,
        "context_length": info.context_length,
        "max_running": info.max_running,
        "micro_batches": info.micro_batches,
        "micro_batches_from": info.micro_batches_from,
        "chained": info.chained,
        "prefix_cache": not info.encodes,
        "whole_prompts": info.encodes,
        "whole_pictures": info.pictures is not None and info.pictures.whole,
    }
    config = SchedulerConfig(**(of_model | settings))
    return Scheduler(config, tiers, masks=masks, drafter=drafter)
