"""The tiers of a worker's KV cache: made from its configuration, watched and changed while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import msgspec
from msgspec.structs import asdict, replace

from sapwood_common.errors import ConfigError
from sapwood_net.sockets.unix_socket import is_unix
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPage, HostPages
from sapwood_worker.core.cache.page_key import PageKey
from sapwood_worker.core.cache.storage.backend import ThreadExecutor
from sapwood_worker.core.cache.storage.opener import StorageFacts, StorageOpener, measure_prefill
from sapwood_worker.core.cache.storage.record import handoff_namespace, take_good
from sapwood_worker.core.cache.storage.store_factory import parse_storage
from sapwood_worker.core.cache.storage.tier import PrefetchOptions, StorageTier
from sapwood_worker.core.cache.transfer.cuda_ipc import CudaIpcBackend, ExportedPages
from sapwood_worker.core.cache.transfer.leases import TransferLeases
from sapwood_worker.core.cache.transfer.mooncake import MooncakeBackend, MooncakeSource
from sapwood_worker.core.cache.transfer.nixl import NixlBackend, NixlSource
from sapwood_worker.core.cache.transfer.reads import READS, PageReads, ReceiveBuffer, TransferReceiver
from sapwood_worker.core.cache.transfer.server import PageServer
from sapwood_worker.core.cache.transfer.tcp import SameHostBackend, SharedMemoryBackend, TcpBackend
from sapwood_worker.core.cache.transfer.transfer_backend import TransferBackend
from sapwood_worker.core.cache.transfer.wire import PageTls, Way
from sapwood_worker.ipc.messages import CacheVerb
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.peer_pages import OwnPool
from sapwood_worker.records.handoff import HandoffTicket
from sapwood_worker.records.load import Load, TierReport
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Runner
from sapwood_worker.settings import Role, TransferBackendName

logger = logging.getLogger(__name__)


T = TypeVar("T")

_BACKENDS: dict[TransferBackendName, Callable[[PageTls | None, HostPool], TransferBackend]] = {
    "auto": lambda tls, _: SameHostBackend(tls),
    "cuda": lambda tls, _: SameHostBackend(tls),  # of a model whose pages are in pieces
    "tcp": lambda tls, _: TcpBackend(tls),
    "shm": lambda tls, _: SharedMemoryBackend(tls),
    "nixl": NixlBackend,
    "mooncake": MooncakeBackend,
}
_ENGINES: dict[TransferBackendName, Callable[[PageTls | None, HostPool], Callable[[str], bytes]]] = {
    "nixl": NixlSource,
    "mooncake": MooncakeSource,
}
_LEAST_PARTS = 32
"""The fewest pages of a chunk that are announced while it is computed: a shorter chunk is over before the other worker hears of
it."""
_OPEN_SECONDS = 30.0
"""Seconds that start-up waits for the store; then the worker starts without it, and the store joins when it answers."""


class TieredRunner(Runner, Protocol):
    """A runner with a second tier.

    Attributes:
        info: Facts about its model.
        host_pool: The memory of the second tier; None: there is none.
    """

    info: ModelInfo
    host_pool: HostPool | None

    def cache_identity(self) -> str:
        """Everything that a page's content depends on besides its tokens and the page size."""
        ...

    def own_pool(self) -> OwnPool | None:
        """The device's pages as other processes read them and copies fill them; None: that cannot be.

        Raises:
            OSError, RuntimeError: There is no GPU.
        """
        ...


class Tiering:
    """The tiers and the store that is attached.

    Args:
        config: The worker's configuration.
        runner: The runner.
        pool: Its host pool.
        seconds_per_token: Seconds that it takes to compute a token of a prompt.

    Attributes:
        cache: The tiers as the scheduler knows them.
        caches: The same alone.
        opener: Attaches and detaches stores.
        fingerprint: A hash of everything besides tokens that pages depend on, used to pair workers; empty: no role has needed it
            yet.

    Raises:
        ConfigError: ``--storage`` is not a store's URL, or ``--kv-transfer-port`` cannot be listened on.
    """

    def __init__(self, config: WorkerConfig, runner: TieredRunner, pool: HostPool, seconds_per_token: float) -> None:
        info = runner.info
        self._page_size, self._page_bytes = info.page_size, pool.whole_bytes
        options = PrefetchOptions(
            policy=config.storage_prefetch.mode,
            timeout=config.storage_prefetch.seconds,
            timeout_per_1k=config.storage_prefetch.per_1k,
            share=config.storage_prefetch.share,
        )
        if config.storage:
            parse_storage(config.storage)
        host = HostPages(pool.num_pages)
        storage = self._storage = StorageTier(host, pool, info.page_size, options, time.monotonic)
        self._config, self._runner, self._pool = config, runner, pool
        self.cache = HierarchicalCache(host, info.num_pages, info.page_size, config.host_cache.write, storage)
        self.caches = (self.cache,)
        self.fingerprint = b""
        self._changes: list[ThreadExecutor] = []
        """They read the model's files for a role that the worker gets while it runs."""
        self._take_role(config.role)
        facts = StorageFacts(
            pool, info.page_size, runner.cache_identity, seconds_per_token, config.storage_prefetch.min_tokens
        )
        self.opener = StorageOpener(storage, facts)
        if config.storage:
            self.opener.open(config.storage)
            self.opener.wait(_OPEN_SECONDS)

    def command(self, verb: CacheVerb, argument: str, answer: Callable[[str], None]) -> None:
        """Carries out an operator's command; calls ``answer`` once, now or in a later :meth:`poll`, with what went wrong if
        anything did."""
        match verb:
            case "attach":
                try:
                    self.opener.open(argument, answer)
                except ConfigError as error:
                    answer(str(error).removeprefix("--storage: "))
            case "detach":
                self.opener.close()
                answer("")
            case "clear":
                if argument in ("host", "all"):
                    self.cache.clear_host()
                if argument == "storage" or (argument == "all" and self._storage.connection is not None):
                    self._storage.clear(answer)
                else:
                    answer("")
            case "role":
                self._change_role(cast(Role, argument), answer)
            case "restore_role":
                answer(self._refusal(cast(Role, argument)))
            case "stats":
                answer("")

    def _change_role(self, role: Role, answer: Callable[[str], None]) -> None:
        """Makes what the role needs, and answers then. Meanwhile the worker serves: a large model's files take long to read."""
        if self.fingerprint or role == "both":
            answer(self._refusal(role))
            return
        executor = ThreadExecutor(threads=1)
        self._changes.append(executor)

        def done(fingerprint: bytes | None, error: Exception | None) -> None:
            self._changes.remove(executor)
            executor.close()
            self.fingerprint = self.fingerprint or fingerprint or b""
            answer(self._refusal(role) if self.fingerprint else f"the model's files cannot be read: {error}")

        executor.submit(lambda: page_fingerprint(self._runner, self._pool), done, urgent=True)

    def _refusal(self, role: Role) -> str:
        """Makes what a role needs, at once; returns why it cannot be had, if it cannot."""
        try:
            self._take_role(role)
        except ConfigError as error:
            return str(error)
        return ""

    def _take_role(self, role: Role) -> None:
        """Makes the objects that the role needs. Objects of an earlier role stay, so that its tickets are still valid.

        Raises:
            ConfigError: This worker cannot offer pages for KV transfers.
        """
        config, cache = self._config, self.cache
        if role != "both" and not self.fingerprint:
            self.fingerprint = page_fingerprint(self._runner, self._pool)
        given = self._runner, cache, self._pool, self.fingerprint
        if role == "prefill" and cache.leases is None:
            if config.host_cache.write != "write_through":
                raise ConfigError(f"--host-cache write={config.host_cache.write}: pages must go to the host at once")
            cache.leases = _build_leases(config, *given)
        if role == "decode" and cache.reads is None:
            cache.reads = _build_takeover(config, *given)

    def report(self, load: Load) -> list[TierReport]:
        """The tiers as they are now."""
        counters, store, host, size = self.cache.counters, self._storage.counters, self.cache.host, self._page_size
        connection, content = self._storage.connection, self._page_bytes
        [device] = device_report(load)
        failing = connection is not None and connection.breaker.is_open
        state = (
            "failing" if failing else "attached" if connection is not None else "opening" if self.opener.url else "none"
        )
        return [
            msgspec.structs.replace(device, hit_tokens=counters.device_hits * size + load.part_page_tokens),
            TierReport(
                tier="host",
                pages=host.num_ready,
                capacity=host.num_pages,
                hit_tokens=counters.host_hits * size,
                bytes_in=counters.stored * content,
                bytes_out=counters.host_hits * content,
                seconds_in=counters.store_seconds,
                seconds_out=counters.load_seconds,
                failures=counters.store_failures,
                dropped_pages=counters.no_room,
            ),
            TierReport(
                tier="storage",
                hit_tokens=store.fetched * size,
                bytes_in=store.written * self._storage.page_bytes,
                bytes_out=store.fetched * self._storage.page_bytes,
                seconds_in=store.seconds_writing,
                seconds_out=store.seconds_reading,
                failures=connection.failures if connection is not None else 0,
                dropped_pages=store.dropped,
                rejected_pages=store.rejected,
                url=self.opener.url,
                state=state,
                error=connection.last_error if connection is not None else self.opener.error,
            ),
        ]

    @property
    def busy(self) -> bool:
        """Whether a store is being opened, or the role changed."""
        return self.opener.opening or bool(self._changes)

    def poll(self) -> None:
        """Goes on with opening a store and with changing the role. Never waits for either."""
        self.opener.poll()
        for executor in tuple(self._changes):
            executor.poll()


def _build_leases(
    config: WorkerConfig, runner: TieredRunner, cache: HierarchicalCache, pool: HostPool, fingerprint: bytes
) -> TransferLeases:
    """The leases of a worker that hands prompts off, and the server by which they are read."""
    tls, backend = _page_tls(config), config.kv_transfer.backend
    engines: dict[Way, Callable[[str], bytes]] = {}
    if backend == "nixl" or backend == "mooncake":
        engines[backend] = _ENGINES[backend](tls, pool)
    device = None
    if (own := _own_pool(config, runner)) is not None and (exported := _on_gpu(config, own.export)) is not None:
        device = ExportedPages(exported, cache.device_epoch)
    server = PageServer("127.0.0.1" if is_unix(config.host) else config.host, config.kv_transfer_port, tls)
    source, epoch = f":{server.port}", time.time_ns()
    leases = TransferLeases(
        cache.host,
        runner.info.page_size,
        fingerprint,
        epoch,
        source,
        config.kv_transfer.share,
        time.monotonic,
        in_parts=_LEAST_PARTS if pool.in_one else 0,
    )
    server.serve(leases, pool, fingerprint, engines, device)
    logger.info("pages are handed off on port %d", server.port)
    return leases


def _build_takeover(
    config: WorkerConfig, runner: TieredRunner, cache: HierarchicalCache, pool: HostPool, fingerprint: bytes
) -> TransferReceiver:
    """Makes the receiver of KV transfers; it also reads into device pages, if the backend can fill them."""
    tls, share = _page_tls(config), config.kv_transfer.share
    executor, own = ThreadExecutor(READS), _own_pool(config, runner)
    backend = _BACKENDS[config.kv_transfer.backend](tls, pool) if own is None else CudaIpcBackend(tls, own)
    ground = HostGround(cache.host, pool, fingerprint, backend)
    host = PageReads(ground, fingerprint, executor, share, time.monotonic)
    if not isinstance(backend, CudaIpcBackend):
        return TransferReceiver(host)
    receive_buffer = ReceiveBuffer(cache, runner.info.num_pages, pool.object_bytes, fingerprint, backend)
    return TransferReceiver(
        host, receive_buffer, PageReads(receive_buffer, fingerprint, executor, share, time.monotonic, host.counters)
    )


def _own_pool(config: WorkerConfig, runner: TieredRunner) -> OwnPool | None:
    """The device's pages, if they are read and filled among processes. Raises as :func:`_on_gpu`."""
    if config.kv_transfer.backend == "cuda" or (config.kv_transfer.backend == "auto" and runner.asynchronous):
        return _on_gpu(config, runner.own_pool)
    return None


def _on_gpu(config: WorkerConfig, made: Callable[[], T | None]) -> T | None:
    """The objects that CUDA IPC needs; None if it is not available and not named in the configuration.

    Raises:
        ConfigError: It cannot be had.
    """
    try:
        return made()
    except (OSError, RuntimeError) as error:
        if config.kv_transfer.backend == "cuda":
            raise ConfigError(f"--kv-transfer cuda: {error}") from error
        logger.info("pages do not go from GPU to GPU: %s", error)
        return None


def _page_tls(config: WorkerConfig) -> PageTls | None:
    """How pages travel: as all else that the worker says."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    if config.tls_client_ca is None:
        raise ConfigError("without --tls-client-ca workers cannot tell who asks for pages")
    return PageTls(config.tls_cert, config.tls_key, config.tls_client_ca)


def page_fingerprint(runner: TieredRunner, pool: HostPool) -> bytes:
    """A hash of everything besides tokens that pages depend on: equal only for workers that can use each other's pages."""
    return bytes.fromhex(handoff_namespace(runner.cache_identity(), runner.info.page_size, pool.object_bytes))


def device_report(load: Load) -> list[TierReport]:
    """The first tier, as far as the load tells."""
    return [TierReport(tier="device", pages=load.used_pages, capacity=load.num_pages, hit_tokens=load.cached_tokens)]


def measure_token_seconds(config: WorkerConfig, runner: TieredRunner) -> float:
    """Seconds that it takes to compute a token of a prompt; runs the model, before any request is accepted."""
    info = runner.info
    counts = [info.num_pages, *(window.num_pages for window in info.windows)]
    longest = min(config.max_step_tokens or info.max_step_tokens, info.context_length - 1)
    return measure_prefill(runner, info.page_size, counts, longest)


# Host pages as the place where pulled pages go: what comes is checked byte by byte, and is a page of the second tier
# then.
_BATCH = 16
"""Few, so that a prompt of 1000 tokens is read by several at once; a connection carries 1 to 2 GB/s."""


class HostGround:
    """Implements :class:`~sapwood_worker.core.cache.transfer.reads.Ground`.

    Args:
        host: The second tier's pages.
        pool: Their memory.
        fingerprint: A hash of everything besides tokens that pages depend on.
        backend: Reads.

    Attributes:
        batch, early_reads: As :class:`~sapwood_worker.core.cache.transfer.reads.Ground` has it.
        page_bytes: Bytes of a page's content.
        parts: Counts bytes that arrived before all layers of their pages were computed.
    """

    batch, early_reads = _BATCH, 4

    def __init__(self, host: HostPages, pool: HostPool, fingerprint: bytes, backend: TransferBackend) -> None:
        self.page_bytes = pool.object_bytes
        self.parts = backend.parts
        self.num_pages = host.num_pages
        self.reserve, self.written, self.abandon = host.reserve, host.written, host.abandon
        self.pin, self.unpin = host.pin, host.unpin
        self._host = host
        self._pool = pool
        self._namespace = fingerprint.hex()
        self._backend = backend

    def writable(self, entries: Sequence[HostPage]) -> bool:
        """Always true: every user of a host page keeps it until the use has ended."""
        return True

    def read(self, ticket: HandoffTicket, indices: Sequence[int], entries: Sequence[HostPage]) -> list[bool]:
        """Reads pages of a ticket; returns which are what it says. Called from several threads."""
        with self._pool.arriving([entry.page for entry in entries]) as records:
            read = self._backend.read(ticket, indices, records)
            return take_good(self._pool, entries, read, records, self._namespace)

    def released(self, serial: int, wanted: Sequence[PageKey]) -> bool:
        """A request waits no longer; returns whether all that it wanted is there."""
        return len(self._host.match(wanted)) == len(wanted)


# The lower tiers of the KV cache where each rank has requests and pages of its own: those of each rank, all equally
# large.


class TiersOfRanks:
    """Does with the ranks' tiers what :class:`~sapwood_worker.core.tiering.Tiering` does with one's.

    A page is the same object for every rank that computes it: each rank reads the pages that it lacks from a store or from other
    workers. Each rank listens at its own port for readers of its pages, from ``--kv-transfer-port`` up.

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
        """Does what :meth:`Tiering.command` does; if several ranks fail, reports the first error."""
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
    """One tier of all ranks: counts are summed, and the state is the worst of the ranks' stores."""
    worst = max(reports, key=lambda each: (each.state == "failing", each.state == "opening"))
    counted = [name for name, value in asdict(worst).items() if not isinstance(value, str)]
    return replace(worst, **{name: sum(getattr(each, name) for each in reports) for name in counted})
