"""The adapters (LoRA) that a worker knows: loaded on request or by name, kept within a budget of host memory, and unloaded.

An adapter has a name, a source and a version. What is loaded of it has a number, which no other load ever gets, and a digest of
the bytes that were read. Requests hold the number, so a request ends with the weights it began with, whatever becomes of the
name. Pages of the KV cache belong to the digest: those of an older load of the name are never found by requests for the new one.

The version is the time at which somebody asked for the load, and the latest counts. Routers pass versions on with requests and
loads, so all workers end up with the latest one; an unloaded version does not come back.

Memory. Adapters that no request uses and that are not pinned are dropped, the least recently used first, when another one needs
their room. They stay known, and the next request loads them again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sapwood_common.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)
from sapwood_worker.records.load import LoraLoads, LoraUse
from sapwood_worker.records.lora import Lora, LoraFacts

logger = logging.getLogger(__name__)

MOST_KNOWN = 4096
"""Names."""
LONGEST_NAME = 128
_MOST_UNLOADED = 4096
"""Unloaded names whose version is remembered."""
_UNKNOWN_SECONDS = 5.0
"""For how long a name that the resolver does not know is not asked for again."""
_MOST_UNKNOWN = 4096
_TRIES = 8
_RESOLVING = 4
"""Names that the resolver is asked for at a time."""

ResultT = TypeVar("ResultT")

Resolver = Callable[[str], str | None]
"""Finds an adapter that is not known: gets its name, returns its path (as ``--lora`` takes it), or None. Called in a thread. It
must not raise, but for SapwoodError."""


class Source(Protocol):
    """What a router knows of an adapter; see ``LoraSource`` of ``worker.proto``."""

    @property
    def path(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> bytes: ...


class Reader(Protocol):
    """The scheduler process, as far as it reads adapters; see :class:`~sapwood_worker.front.engine.Engine`."""

    async def read_lora(self, lora: Lora) -> LoraFacts: ...

    async def drop_lora(self, number: int) -> None: ...


@dataclass(eq=False, slots=True)
class LoadedLora:
    """Weights that were read.

    Attributes:
        name: The adapter's.
        facts: Its number, digest and sizes.
        aborts: For each request that has it, what ends the request early.
        leaving: Whether no further request gets it; it is dropped when the last has ended.
    """

    name: str
    facts: LoraFacts
    aborts: dict[int, Callable[[], None]] = field(default_factory=dict)
    leaving: bool = False

    @property
    def digest(self) -> str:
        """Stands for the adapter in the namespace of cached pages."""
        return self.facts.digest.hex()


@dataclass(eq=False, slots=True)
class KnownLora:
    """An adapter that requests may name.

    Attributes:
        name: Its name.
        path: Where it is loaded from.
        version: Nanoseconds since 1970.
        pinned: Whether it stays in memory.
        loaded: None: it is not in memory.
        loading: Loads it.
        used: When a request last named it, on the clock of time.monotonic; None: never.
    """

    name: str
    path: str
    version: int
    pinned: bool = False
    loaded: LoadedLora | None = None
    loading: asyncio.Future[LoadedLora] | None = None
    used: float | None = None


class LoraUseTicket:
    """A request's hold on an adapter; :meth:`release` may be called again.

    Args:
        loras: Where it is from.
        loaded: The adapter.
        serial: The number of this hold.
    """

    __slots__ = ("_loras", "_serial", "loaded")

    def __init__(self, loras: Loras, loaded: LoadedLora, serial: int) -> None:
        self._loras = loras
        self.loaded = loaded
        self._serial = serial

    def on_abort(self, abort: Callable[[], None]) -> None:
        """Calls ``abort`` if somebody unloads the adapter and wants its requests to end."""
        if self._serial in self.loaded.aborts:
            self.loaded.aborts[self._serial] = abort

    def release(self) -> None:
        """The request has ended."""
        if self.loaded.aborts.pop(self._serial, None) is not None:
            self._loras.released(self.loaded)


class Loras:
    """The adapters of a worker. Lives on one event loop.

    Args:
        reader: Reads and drops.
        fetch: The local folder or file of a path; called in a thread. Raises ConfigError.
        budget: Most bytes of host memory for adapters.
        named: Known from the start: name, path, and whether it is pinned.
        resolver: Asked for names that are not known; None: nobody is.
        clock: Seconds, monotonic.
        now: Nanoseconds since 1970.

    Attributes:
        slots: Adapters that the device holds at once; 0: the worker serves none. Set when the model is loaded.
        reserved: Names that no adapter may have: the model's.
        loads: The scheduler's account of slots and requests.
        on_change: Called whenever ``report_version`` increases.
        report_version: Increases whenever :meth:`known` or what is loaded changes.
        read_total: How often an adapter was read since the start.
        failed_total: How often one could not be.
    """

    def __init__(
        self,
        reader: Reader,
        fetch: Callable[[str], Path],
        budget: int,
        named: Iterable[tuple[str, str, bool]] = (),
        resolver: Resolver | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._reader = reader
        self._fetch = fetch
        self.budget = budget
        self._resolver = resolver
        self._clock = clock
        self._now = now
        self.slots = 0
        self.reserved: frozenset[str] = frozenset()
        self.loads: Callable[[], LoraLoads | None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.report_version = 0
        self.read_total = self.failed_total = 0
        self._numbers = itertools.count(1)
        self._serials = itertools.count()
        # The least recently used first.
        self._known: dict[str, KnownLora] = {name: KnownLora(name, path, 1, pinned) for name, path, pinned in named}
        self._in_memory: dict[int, LoadedLora] = {}
        self._expected = 0
        self._unloaded: dict[str, int] = {}
        self._unknown: dict[str, float] = {}
        self._resolving = asyncio.Semaphore(_RESOLVING)
        self._tasks: set[asyncio.Future[Any]] = set()
        self._life = 0

    @property
    def resolves(self) -> bool:
        """Whether names that are not known may be found when a request names them."""
        return self._resolver is not None and self.slots > 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all adapters in memory, those of unloaded ones that requests still use among them."""
        return sum(each.facts.bytes for each in [*self._in_memory.values()])  # also asked by the thread of /metrics

    def known(self) -> list[KnownLora]:
        """All adapters, by name."""
        return [self._known[name] for name in sorted(self._known)]

    def name_of(self, digest: str) -> str:
        """The name of an adapter in memory with this digest; empty: there is none."""
        return next((each.name for each in self._in_memory.values() if each.digest == digest), "")

    def uses(self) -> dict[str, LoraUse]:
        """Running and waiting requests by name, those of an earlier load of the name included."""
        loads = self.loads()
        found: dict[str, LoraUse] = {}
        for use in () if loads is None else loads.uses:
            loaded = self._in_memory.get(use.number)
            if loaded is not None:
                before = found.get(loaded.name, LoraUse(use.number, 0, 0))
                found[loaded.name] = LoraUse(use.number, before.running + use.running, before.waiting + use.waiting)
        return found

    def on_device(self, known: KnownLora) -> bool:
        """Whether a slot of the device holds it."""
        loads = self.loads()
        return known.loaded is not None and loads is not None and known.loaded.facts.number in loads.slots

    def idle_seconds(self, known: KnownLora) -> float | None:
        """Seconds since a request last named it; None: none has."""
        return None if known.used is None else self._clock() - known.used

    # Requests.

    async def use(self, name: str, source: Source | None = None) -> LoraUseTicket:
        """Holds an adapter for a request that names it, and loads it first if need be. The caller releases it.

        Raises:
            NotFoundError: There is no such adapter, or its files are of no use. The log says why: clients are not shown paths.
            UnavailableError: It has another digest than the request's earlier tokens; or the scheduler is gone.
            ResourceExhaustedError: There is no room for it.
        """
        for _ in range(_TRIES):
            try:
                known = await self._find(name, source)
                loaded = known.loaded or await self._loaded(known)
            except InvalidArgumentError as error:
                raise NotFoundError(
                    f"adapter {name!r} cannot be loaded: the worker's log says why", field="lora_name"
                ) from error
            if not loaded.leaving:
                break  # else it was unloaded, replaced or dropped while it was being loaded
        else:
            raise ResourceExhaustedError(f"adapter {name!r} is dropped again and again for others", retry_after=1.0)
        if source is not None and source.digest and source.digest != loaded.facts.digest:
            raise UnavailableError(f"adapter {name!r} has changed since the request began")
        known.used = self._clock()
        if self._known.get(name) is known:
            self._known[name] = self._known.pop(name)
        serial = next(self._serials)
        loaded.aborts[serial] = lambda: None
        return LoraUseTicket(self, loaded, serial)

    def held(self, name: str) -> LoadedLora:
        """An adapter that is in memory. Raises NotFoundError: there is none of this name."""
        known = self._known.get(name)
        if known is None or known.loaded is None:
            raise self._not_found(name)
        return known.loaded

    def released(self, loaded: LoadedLora) -> None:
        """A request with this adapter has ended."""
        if loaded.leaving and not loaded.aborts:
            self._drop(loaded)

    # Operators.

    async def load(self, name: str, path: str, *, pinned: bool = False, version: int | None = None) -> KnownLora:
        """Loads an adapter, in the place of one of the same name.

        Args:
            name: Its name.
            path: Where it is; empty: where it was loaded from before.
            pinned: Whether it stays in memory.
            version: Of a router that has seen it elsewhere; None: now.

        Raises:
            InvalidArgumentError: Name or path will not do, or the adapter is wrong.
            NotFoundError: This version was unloaded, or nothing is known of the name and there is no path.
            ResourceExhaustedError: There is no memory for it.
            UnavailableError: The scheduler is gone.
        """
        self._check_name(name)
        before = self._known.get(name)
        if version is not None:
            if self._unloaded.get(name, 0) >= version:
                raise NotFoundError(f"adapter {name!r} was unloaded", field="name")
            if before is not None and before.version >= version:
                before.pinned = before.pinned or pinned
                await self._loaded(before)
                return before
        if not path and before is None:
            raise InvalidArgumentError(f"path is missing: adapter {name!r} was not loaded before", field="path")
        if before is None:
            self._make_place()
        wanted = KnownLora(name, path or (before.path if before is not None else ""), version or self._now(), pinned)
        await self._loaded(wanted)
        return self._known.get(name, wanted)

    async def replace(self, name: str, path: str, version: int) -> KnownLora | None:
        """Loads an adapter in the place of an older version; if there is none, no older version is loaded from now on. Raises as
        :meth:`load`."""
        self._check_name(name)
        if name in self._known:
            return await self.load(name, path, pinned=self._known[name].pinned, version=version)
        self._note_unloaded(name, version - 1)
        return None

    def unload(self, name: str, *, abort: bool = False) -> int:
        """Forgets an adapter; returns how many requests still run with it.

        Args:
            name: Its name.
            abort: Whether they end now.

        Raises:
            NotFoundError: There is no such adapter.
        """
        known = self._known.pop(name, None)
        self._note_unloaded(name, self._now())  # also if it is not known: a router may be about to load it here
        if known is None:
            raise self._not_found(name)
        self._note_unloaded(name, known.version)
        self._changed()
        loaded = known.loaded
        if loaded is None:
            return 0
        if abort:
            for each in [*loaded.aborts.values()]:
                each()
        running = len(loaded.aborts)
        self._retire(loaded)
        return running

    # The scheduler process.

    async def started(self) -> None:
        """A scheduler process is ready; it holds no adapter. Loads those that are pinned.

        Raises:
            SapwoodError: One of them cannot be loaded; the others are not tried.
        """
        for known in [*self._known.values()]:
            if known.pinned:
                await self._loaded(known)

    def lost(self) -> None:
        """The scheduler process is gone, with all adapters and requests."""
        self._life += 1
        self._in_memory.clear()
        self._expected = 0
        for known in self._known.values():
            known.loaded = None
        self._changed()

    # How an adapter is found and loaded.

    async def _find(self, name: str, source: Source | None) -> KnownLora:
        if not self.slots:
            raise NotFoundError(
                f"there is no adapter {name!r}: this worker has no slots for adapters", field="lora_name"
            )
        known = self._known.get(name)
        if (
            source is not None
            and source.path
            and source.version > max(known.version if known is not None else 0, self._unloaded.get(name, 0))
        ):
            self._check_name(name)
            pinned = known is not None and known.pinned
            if known is None:
                self._make_place()
            return await self._settled(KnownLora(name, source.path, source.version, pinned))
        if known is not None:
            return known
        if self._resolver is None:
            raise self._not_found(name)
        return await self._resolved(name, self._resolver)

    async def _settled(self, wanted: KnownLora) -> KnownLora:
        await self._loaded(wanted)
        return self._known.get(wanted.name, wanted)

    async def _resolved(self, name: str, resolver: Resolver) -> KnownLora:
        if self._unknown.get(name, 0.0) > self._clock():
            raise self._not_found(name)
        if not _is_name(name):  # a client's: no adapter can be called so
            raise self._not_found(name)
        async with self._resolving:
            path = await _in_thread(lambda: resolver(name))
        if name in self._known:
            return self._known[name]
        if path is None:
            while len(self._unknown) >= _MOST_UNKNOWN:
                del self._unknown[next(iter(self._unknown))]
            self._unknown[name] = self._clock() + _UNKNOWN_SECONDS
            raise self._not_found(name)
        self._unknown.pop(name, None)
        self._make_place()
        known = self._known[name] = KnownLora(name, path, self._now())
        self._changed()
        return known

    async def _loaded(self, known: KnownLora) -> LoadedLora:
        """What is in memory of an adapter; loads it if need be. All who wait for a load wait for the same one."""
        if known.loaded is not None:
            return known.loaded
        if known.loading is None:
            known.loading = self._spawn(self._load(known))
            self._changed()
        return await asyncio.shield(known.loading)

    async def _load(self, known: KnownLora) -> LoadedLora:
        began, life = self._clock(), self._life
        try:
            loaded = await self._read(known)
        except SapwoodError as error:
            self.failed_total += 1
            logger.warning("adapter %s (%s) was not loaded: %s", known.name, known.path, error.message)
            raise
        finally:
            known.loading = None
            self._changed()
        if life != self._life:
            raise UnavailableError("the worker's scheduler stopped", retry_after=1.0)
        self._in_memory[loaded.facts.number] = loaded
        self.read_total += 1
        self._install(known, loaded)
        facts = loaded.facts
        logger.info(
            "adapter %s loaded from %s in %.2f s: number %d, rank %d, %.1f MB, digest %s",
            *(known.name, known.path, self._clock() - began, facts.number, facts.rank, facts.bytes / 1e6),
            loaded.digest[:16],
        )
        return loaded

    def _install(self, known: KnownLora, loaded: LoadedLora) -> None:
        """Makes what was loaded the adapter of its name, unless a later version is there or it was unloaded."""
        name, present = known.name, self._known.get(known.name)
        gone = self._unloaded.get(name, 0) >= known.version
        if gone or (present is not None and present is not known and present.version > known.version):
            self._retire(loaded)
            return
        known.loaded = loaded
        if present is not None and present is not known:
            known.used = present.used
            if present.loaded is not None:
                self._retire(present.loaded)
        self._known[name] = known
        self._changed()

    async def _read(self, known: KnownLora) -> LoadedLora:
        try:
            folder = await _in_thread(lambda: self._fetch(known.path))
            size = await _in_thread(lambda: _size_of(folder))
        except ConfigError as error:
            raise InvalidArgumentError(f"adapter {known.name!r}: {error}", field="path") from error
        except OSError as error:
            raise InvalidArgumentError(f"adapter {known.name!r}: {error}", field="path") from error
        if size > self.budget:
            raise ResourceExhaustedError(
                f"adapter {known.name!r} has {size} bytes, and the host's memory for adapters is {self.budget}",
                field="path",
            )
        self._make_room(known.name, size)
        self._expected += size
        try:
            facts = await self._reader.read_lora(Lora(next(self._numbers), known.name, str(folder)))
        finally:
            self._expected = max(0, self._expected - size)
        try:
            self._make_room(known.name, facts.bytes)  # in memory it may be larger than its file
        except ResourceExhaustedError:
            self._spawn(self._reader.drop_lora(facts.number))
            raise
        return LoadedLora(known.name, facts)

    def _make_room(self, name: str, size: int) -> None:
        """Drops adapters that nobody uses until there is room for one more.

        Raises:
            ResourceExhaustedError: All others are in use or pinned.
        """
        free = self.budget - self.host_bytes - self._expected
        idle = [
            known
            for known in self._known.values()
            if known.loaded is not None and not known.loaded.aborts and not known.pinned and known.name != name
        ]
        leaving = []
        for known in idle:
            if free >= size:
                break
            assert known.loaded is not None
            leaving.append(known)
            free += known.loaded.facts.bytes
        if free < size:
            raise ResourceExhaustedError(
                f"adapter {name!r} needs {size} bytes, and the host's memory for adapters ({self.budget} bytes) is full of "
                "adapters that are pinned or in use",
                retry_after=1.0,
            )
        for known in leaving:
            assert known.loaded is not None
            loaded, known.loaded = known.loaded, None
            self._retire(loaded)
            self._changed()

    def _make_place(self) -> None:
        """Forgets a name that is not in memory if there are too many.

        Raises:
            ResourceExhaustedError: All are in memory.
        """
        if len(self._known) < MOST_KNOWN:
            return
        for name, known in self._known.items():
            if known.loaded is None and known.loading is None and not known.pinned:
                del self._known[name]
                return
        raise ResourceExhaustedError(f"{MOST_KNOWN} adapters are known: unload some")

    def _retire(self, loaded: LoadedLora) -> None:
        """No further request gets it; it is dropped when those that have it have ended."""
        loaded.leaving = True
        if not loaded.aborts:
            self._drop(loaded)

    def _drop(self, loaded: LoadedLora) -> None:
        self._spawn(self._dropped(loaded))

    async def _dropped(self, loaded: LoadedLora) -> None:
        life = self._life
        try:
            await self._reader.drop_lora(loaded.facts.number)
        except UnavailableError:
            return  # it went with the scheduler
        if life == self._life:
            self._in_memory.pop(loaded.facts.number, None)

    def _note_unloaded(self, name: str, version: int) -> None:
        """Neither this version of an adapter nor an older one is loaded unless an operator asks for it."""
        self._unloaded[name] = max(version, self._unloaded.pop(name, 0))
        while len(self._unloaded) > _MOST_UNLOADED:
            del self._unloaded[next(iter(self._unloaded))]

    def _changed(self) -> None:
        self.report_version += 1
        self.on_change()

    def _check_name(self, name: str) -> None:
        if not _is_name(name):
            raise InvalidArgumentError(
                f"the name of an adapter has 1 to {LONGEST_NAME} printable characters and no colon", field="name"
            )
        if name in self.reserved:
            raise InvalidArgumentError(f"{name!r} is the model's own name", field="name")

    def _not_found(self, name: str) -> NotFoundError:
        return NotFoundError(f"there is no adapter {name[:100]!r} here", field="lora_name")

    def _spawn(self, work: Awaitable[ResultT]) -> asyncio.Future[ResultT]:
        task: asyncio.Future[ResultT] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # those that wait for it get it


def _is_name(name: str) -> bool:
    """Whether an adapter may be called so."""
    return 1 <= len(name) <= LONGEST_NAME and ":" not in name and name.isprintable() and name == name.strip()


def aborted(name: str) -> RequestCancelledError:
    """The error of a request whose adapter was unloaded, and whose end was asked for."""
    return RequestCancelledError(f"adapter {name!r} was unloaded")


def _size_of(path: Path) -> int:
    """Bytes of an adapter's weights on disk; 0 if they are not found."""
    files = [path] if path.is_file() else [*path.glob("adapter_model.*")]
    return sum(file.stat().st_size for file in files)


async def _in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Runs something that may take long in a thread of its own, for which a worker that ends does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:  # the loop has ended
            return

    threading.Thread(target=run, name="adapter files", daemon=True).start()
    return await future
