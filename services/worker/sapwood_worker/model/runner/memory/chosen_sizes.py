"""The sizes of a runner, from its device and its model, the same on all ranks."""

from __future__ import annotations

import logging

import torch

from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.pools.host_pool import memory_limit
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.sizes import DeviceFacts, Given, ModelFacts, Sizes, choose_sizes
from sapwood_worker.records.kv_layout import KVLayout

logger = logging.getLogger(__name__)


def chosen_sizes(
    options: RunnerOptions, config: ModelConfig, layout: KVLayout, device: torch.device, parallel: Parallel
) -> Sizes:
    """What runs at once. The weights are loaded: what is used of a GPU's memory is known.

    Args:
        options: What is given.
        config: The model's.
        layout: What a page holds on this rank.
        device: This rank's.
        parallel: The groups of ranks.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts = DeviceFacts("cuda", total, total - free)
    else:
        facts = DeviceFacts("cpu", memory_limit())
    model = ModelFacts(
        token_bytes=layout.page_bytes / options.page_size,
        hidden_size=config.hidden_size,
        intermediate_size=-(-config.intermediate_size // parallel.tp.size),
        context_length=config.max_position,
    )
    given = Given(
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        cache_tokens=None if options.num_pages is None else options.num_pages * options.page_size,
        cache_bytes=options.kv_cache_bytes,
        memory_fraction=options.memory_fraction,
    )
    # Ranks may find different amounts of memory: all take what the one with the least chose.
    sizes = min(parallel.exchange(choose_sizes(facts, model, given), Sizes), key=lambda each: each.least)
    for reason in sizes.reasons:
        logger.info("%s", reason)
    return sizes
