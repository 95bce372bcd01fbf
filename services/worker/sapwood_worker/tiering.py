"""The tiers of a worker's KV cache: made from its configuration, watched and changed while it runs."""

from __future__ import annotations

import time
from typing import Protocol

from sapwood_worker.cache.hierarchical import HierarchicalCache
from sapwood_worker.cache.host_pages import HostPages
from sapwood_worker.cache.host_pool import HostPool
from sapwood_worker.cache.storage.factory import parse_storage
from sapwood_worker.cache.storage.opener import StorageFacts, StorageOpener, measure_prefill
from sapwood_worker.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model_info import ModelInfo
from sapwood_worker.scheduler.output import Runner

_OPEN_SECONDS = 10.0
"""How long start-up waits for the store; after that it goes on without, and the store joins when it answers."""


class TieredRunner(Runner, Protocol):
    """A runner with a second tier.

    Attributes:
        info: Facts about its model.
        host_pool: The memory of the second tier; None: there is none.
    """

    info: ModelInfo
    host_pool: HostPool | None

    def cache_identity(self) -> str:
        """What a page's content depends on besides its tokens, other than the page size."""
        ...


class Tiering:
    """The tiers and the store that is attached.

    Args:
        config: The worker's configuration.
        runner: The runner, before any request is let in: it is measured.
        pool: Its host pool.

    Attributes:
        cache: What the scheduler works with.
        opener: Attaches and detaches stores.

    Raises:
        ConfigError: ``--storage`` is not a store's URL.
    """

    def __init__(self, config: WorkerConfig, runner: TieredRunner, pool: HostPool) -> None:
        info = runner.info
        options = PrefetchOptions(
            policy=config.storage_prefetch,
            timeout=config.storage_timeout,
            timeout_per_1k=config.storage_timeout_per_1k,
            share=config.storage_share,
        )
        if config.storage:
            parse_storage(config.storage)
        host = HostPages(pool.num_pages)
        storage = StorageTier(host, pool, info.page_size, options, time.monotonic)
        self.cache = HierarchicalCache(host, info.num_pages, info.page_size, config.host_write_policy, storage)
        speed = measure_prefill(
            runner, info.page_size, info.num_pages, min(config.max_step_tokens, info.context_length - 1)
        )
        facts = StorageFacts(pool, info.page_size, runner.cache_identity, speed, config.storage_min_tokens)
        self.opener = StorageOpener(storage, facts)
        if config.storage:
            self.opener.open(config.storage)
            self.opener.wait(_OPEN_SECONDS)

    @property
    def busy(self) -> bool:
        """Whether a store is being opened."""
        return self.opener.opening

    def poll(self) -> None:
        """Goes on with opening a store. Never blocks."""
        self.opener.poll()


def build_tiering(config: WorkerConfig, runner: TieredRunner) -> Tiering | None:
    """The tiers below the device's pages; None: there are none.

    Raises:
        ConfigError: See :class:`Tiering`.
    """
    return None if runner.host_pool is None or not config.prefix_cache else Tiering(config, runner, runner.host_pool)
