"""The second tier of the KV cache where each rank has requests and pages of its own: one of each rank, all equally large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host_pages import HostPages
from sapwood_worker.core.tiering import TieredRunner, device_report
from sapwood_worker.ipc.messages import CacheVerb
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.load import Load
from sapwood_worker.records.tier_report import TierReport


class TiersOfRanks:
    """Does for the ranks' tiers what :class:`~sapwood_worker.core.tiering.Tiering` does for one's. There is no store beyond them.

    Args:
        config: The worker's configuration.
        runner: The runner.
        pool: Rank 0's host pool; the others' have as many pages, which only they can read.

    Attributes:
        caches: Each rank's tiers, as its scheduler knows them.
    """

    busy = False

    def __init__(self, config: WorkerConfig, runner: TieredRunner, pool: HostPool) -> None:
        info = runner.info
        self._page_bytes, self._page_size = pool.page_bytes, info.page_size
        self.caches: Sequence[HierarchicalCache] = [
            HierarchicalCache(HostPages(pool.num_pages), info.num_pages, info.page_size, config.host_write_policy)
            for _ in range(info.attention_ranks)
        ]

    def command(self, verb: CacheVerb, argument: str, answer: Callable[[str], None]) -> None:
        """As :meth:`Tiering.command`."""
        if verb in ("attach", "detach") or (verb, argument) == ("clear", "storage"):
            answer("with --data-parallel-attention there is no store: each rank has pages of its own")
        elif verb == "role" and argument != "both":
            answer("with --data-parallel-attention nothing is handed off: each rank has pages of its own")
        else:
            if verb == "clear" and argument in ("host", "all"):
                for cache in self.caches:
                    cache.clear_host()
            answer("")

    def report(self, load: Load) -> list[TierReport]:
        """The tiers as they are now, all ranks' together."""
        counters = [cache.counters for cache in self.caches]
        host = TierReport(
            tier="host",
            pages=load.host_used_pages,
            capacity=load.host_num_pages,
            hit_tokens=load.host_hit_tokens,
            bytes_in=sum(each.stored for each in counters) * self._page_bytes,
            bytes_out=sum(each.host_hits for each in counters) * self._page_bytes,
            seconds_in=sum(each.store_seconds for each in counters),
            seconds_out=sum(each.load_seconds for each in counters),
            failures=sum(each.store_failures for each in counters),
            dropped_pages=sum(each.no_room for each in counters),
        )
        return [*device_report(load), host]

    def poll(self) -> None:
        """Nothing goes on between steps."""
