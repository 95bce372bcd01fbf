"""The lower tiers of the KV cache where each rank has requests and pages of its own: those of each rank, all equally large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import asdict, replace

from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.tiering import TieredRunner, Tiering
from sapwood_worker.ipc.messages import CacheVerb
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.records.load import Load
from sapwood_worker.records.tier_report import TierReport


class TiersOfRanks:
    """Does with the ranks' tiers what :class:`~sapwood_worker.core.tiering.Tiering` does with one's.

    A page is the same object whichever rank has computed it: of a store, and of what other workers hand off, each rank reads what
    it lacks. Each listens at a port of its own for those that read what it hands off, from ``--kv-transfer-port`` up.

    Args:
        config: The worker's configuration.
        runner: The runner.
        pool: Rank 0's host pool, which has the others'.
        seconds_per_token: As :class:`Tiering` takes it.

    Attributes:
        caches: Each rank's tiers, as its scheduler knows them.

    Raises:
        ConfigError: As :class:`Tiering`.
    """

    def __init__(self, config: WorkerConfig, runner: TieredRunner, pool: HostPool, seconds_per_token: float) -> None:
        self._ranks = [
            Tiering(_of_rank(config, rank), runner, each, seconds_per_token)
            for rank, each in enumerate((pool, *pool.others))
        ]
        self.caches: Sequence[HierarchicalCache] = [each.cache for each in self._ranks]

    @property
    def fingerprint(self) -> bytes:
        """As :class:`Tiering` has it."""
        return self._ranks[0].fingerprint

    @property
    def busy(self) -> bool:
        """As :attr:`Tiering.busy`."""
        return any(each.busy for each in self._ranks)

    def command(self, verb: CacheVerb, argument: str, answer: Callable[[str], None]) -> None:
        """As :meth:`Tiering.command`; of what goes wrong with several ranks the first is told."""
        said: list[str] = []

        def one(error: str) -> None:
            said.append(error)
            if len(said) == len(self._ranks):
                answer(next((each for each in said if each), ""))

        for each in self._ranks:
            each.command(verb, argument, one)

    def report(self, load: Load) -> list[TierReport]:
        """The tiers as they are now, all ranks' together."""
        devices, *lower = zip(*(each.report(load) for each in self._ranks), strict=True)
        device = replace(devices[0], hit_tokens=sum(each.hit_tokens for each in devices))
        return [device, *map(_together, lower)]

    def poll(self) -> None:
        """As :meth:`Tiering.poll`."""
        for each in self._ranks:
            each.poll()


def _of_rank(config: WorkerConfig, rank: int) -> WorkerConfig:
    return config.model_copy(update={"kv_transfer_port": config.kv_transfer_port and config.kv_transfer_port + rank})


def _together(reports: Sequence[TierReport]) -> TierReport:
    """One tier of all ranks: what is counted is summed, and of a store's states the worst is told."""
    worst = max(reports, key=lambda each: (each.state == "failing", each.state == "opening"))
    counted = [name for name, value in asdict(worst).items() if not isinstance(value, str)]
    return replace(worst, **{name: sum(getattr(each, name) for each in reports) for name in counted})
