"""Makes pools of pages on the device: small ones for trial steps, and the one for good, in the memory that these leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sapwood_common.errors import ConfigError
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.model.runner.memory.device_tier import build_device_pool
from sapwood_worker.model.runner.memory.memory_profile import measure_pool_bytes
from sapwood_worker.model.runner.memory.page_counts import plan_pages
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.sizes import Sizes
from sapwood_worker.records.kv_layout import KVLayout

SCRATCH_PAGES = 1
"""Pages of a pool beyond those that the scheduler knows of: padding rows write there."""


class PoolBuilder:
    """Makes the pools of one model.

    Args:
        options: The runner's.
        layout: What a page holds on this rank.
        sizes: What runs at once.
        device: Where the pages are.
        scales: Of keys and values in float8; None: they are not.
        parallel: The ranks, all of which get as many pages as the one with the least room.
    """

    def __init__(
        self,
        options: RunnerOptions,
        layout: KVLayout,
        sizes: Sizes,
        device: torch.device,
        scales: KVScales | None,
        parallel: Parallel,
    ) -> None:
        self._options = options
        self._layout = layout
        self._sizes = sizes
        self._device = device
        self._scales = scales
        self._parallel = parallel

    def build(self, counts: Sequence[int]) -> DevicePool:
        """A pool of so many pages in each group of the layout, beside the scratch pages.

        Raises:
            ConfigError: They are too few, or there is no memory for them.
        """
        running = self._sizes.max_running
        if counts[0] < running:
            raise ConfigError(
                f"the KV cache holds {counts[0]} pages of {self._options.page_size} tokens, fewer than the "
                f"{running} requests that may run: give it more memory or lower --max-running"
            )
        return build_device_pool(self._layout, [count + SCRATCH_PAGES for count in counts], self._device, self._scales)

    def trial(self, longest: int) -> tuple[list[int], DevicePool]:
        """The prompts of a step with the most tokens, by their lengths of at most ``longest``, and a pool that holds them."""
        running, step_tokens = self._sizes.max_running, self._sizes.max_step_tokens
        prompts = [min(longest, step_tokens)]
        while sum(prompts) < step_tokens and len(prompts) < running:
            prompts.append(min(longest, step_tokens - sum(prompts)))
        needed = sum(-(-length // self._options.page_size) for length in prompts)
        return prompts, self.build([max(needed, running)] * len(self._layout.groups))

    def page_counts(self, num_pages: int | None, beside: int, try_step: Callable[[], int]) -> tuple[int, ...]:
        """The pages of each group of the layout, for good.

        Args:
            num_pages: Pages of the first group; None: as many as the memory holds.
            beside: Bytes that another model keeps of each page, out of the same memory.
            try_step: Computes the largest step with all of a runner's buffers and a trial pool; returns that pool's bytes.

        Raises:
            ConfigError: There is no memory for them.
        """
        sizes, memory = self._sizes, self._sizes.cache_bytes
        if num_pages is None and memory is None:
            memory = measure_pool_bytes(self._device, self._options.memory_fraction, try_step)
        own_bytes = self._layout.page_bytes
        share = own_bytes / (own_bytes + beside)
        own = plan_pages(
            self._layout,
            num_pages,
            int((memory or 0) * share),
            sizes.max_running,
            sizes.max_step_tokens,
            alone=not beside,
        )
        return tuple(map(min, zip(*self._parallel.exchange(own, tuple[int, ...]), strict=True)))
