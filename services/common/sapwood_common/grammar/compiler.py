"""Compiles grammars for a service, each once, within bounds, and keeps the artefacts.

Bounds: the source's size; a deadline for each caller; the processes of the pool, in which callers with other salts have fair
places; a budget of bytes for artefacts (the least recently used one goes first; each costs its bytes and 256 more). Callers with
the same grammar share one compilation, which is killed when the last of them has gone. O(1) for a hit.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_common.child_pool import ChildDiedError, ChildPool, PoolLimits, Progress
from sapwood_common.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError, SapwoodError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.source import GrammarSource

_ENTRY_OVERHEAD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """What a compiler may use.

    Attributes:
        max_source_bytes: Longest source, in UTF-8.
        timeout: Most seconds for one call, its wait for a process included.
        processes: Most compilations at a time.
        cache_bytes: Most bytes of artefacts kept.
    """

    max_source_bytes: int = 1 << 20
    timeout: float = 10.0
    processes: int = 2
    cache_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Compiled:
    """What compiling a source gave.

    Attributes:
        artefact: The serialised :class:`~sapwood_common.grammar.artefact.GrammarArtefact`.
        left_out: What its lenient schemas ask for and the grammar does not enforce.
    """

    artefact: bytes
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class _Job:
    task: asyncio.Task[Compiled]
    progress: Progress
    waiters: int = 0


class GrammarCompiler:
    """Compiles for one vocabulary. Lives on one event loop.

    Args:
        fingerprint: The vocabulary's.
        special_names: Names of its special tokens.
        limits: What compiling may use.

    Attributes:
        cached_bytes: Bytes that the kept artefacts cost now.
    """

    def __init__(
        self, fingerprint: bytes, special_names: tuple[str, ...], limits: CompilerLimits | None = None
    ) -> None:
        self._fingerprint = fingerprint
        self._limits = limits or CompilerLimits()
        self._pool = CompilePool(special_names, self._limits.processes)
        self._jobs: dict[bytes, _Job] = {}
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self.cached_bytes = 0

    def find(self, source: GrammarSource) -> bytes | None:
        """The artefact if it is kept; counts as a use."""
        key = source.key(self._fingerprint)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return None if kept is None else kept.artefact

    async def compile(self, source: GrammarSource, timeout: float | None = None) -> bytes:
        """As :meth:`compile_noting`; only the artefact."""
        return (await self.compile_noting(source, timeout)).artefact

    async def compile_noting(self, source: GrammarSource, timeout: float | None = None) -> Compiled:
        """The compiled grammar, and the parts of the source that it does not enforce.

        Args:
            source: What to compile.
            timeout: The caller's own time, in seconds; the earlier of it and the compiler's counts.

        Raises:
            InvalidArgumentError: The grammar is too large, malformed, or cannot be enforced; its field is named.
            DeadlineExceededError: It took too long; the compilation is killed unless others wait for it.
            ResourceExhaustedError: Too many grammars wait to be compiled, or it had to wait for others too long.
        """
        field = f"grammar.{source.kind}"
        size = len(source.text.encode())
        if size > self._limits.max_source_bytes:
            raise InvalidArgumentError(
                f"the grammar has {size} bytes; at most {self._limits.max_source_bytes} are compiled", field=field
            )
        key = source.key(self._fingerprint)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept
        allowed = self._limits.timeout if timeout is None else min(timeout, self._limits.timeout)
        job = self._join(key, source)
        try:
            async with asyncio.timeout(allowed):
                return await asyncio.shield(job.task)
        except TimeoutError:
            ran = job.progress.seconds(asyncio.get_running_loop().time())
            raise _time_up(field, allowed, ran, own=allowed >= self._limits.timeout) from None
        finally:
            self._leave(key, job)

    async def close(self) -> None:
        """Ends all compilations."""
        for job in self._jobs.values():
            job.task.cancel()
        await self._pool.close()

    def _join(self, key: bytes, source: GrammarSource) -> _Job:
        job = self._jobs.get(key)
        if job is None:
            progress = Progress()
            job = self._jobs[key] = _Job(asyncio.create_task(self._run(key, source, progress)), progress)
        job.waiters += 1
        return job

    def _leave(self, key: bytes, job: _Job) -> None:
        job.waiters -= 1
        if job.waiters == 0 and not job.task.done():
            job.task.cancel()
            # A caller that comes now must not join what is being killed.
            if self._jobs.get(key) is job:
                del self._jobs[key]

    async def _run(self, key: bytes, source: GrammarSource, progress: Progress) -> Compiled:
        job = self._jobs[key]
        try:
            lark, left_out = await self._pool.compile(source, progress)
        finally:
            if self._jobs.get(key) is job:
                del self._jobs[key]
        artefact = GrammarArtefact.of(source, self._fingerprint, lark).to_bytes()
        compiled = Compiled(artefact, tuple(left_out))
        self._keep(key, compiled)
        return compiled

    def _keep(self, key: bytes, compiled: Compiled) -> None:
        cost = len(compiled.artefact) + _ENTRY_OVERHEAD
        if cost > self._limits.cache_bytes:
            return
        self._kept[key] = compiled
        self.cached_bytes += cost
        while self.cached_bytes > self._limits.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.cached_bytes -= len(oldest.artefact) + _ENTRY_OVERHEAD


def _time_up(field: str, allowed: float, ran: float, *, own: bool) -> SapwoodError:
    """Why a grammar was not compiled in time.

    Args:
        field: Its field.
        allowed: The seconds it had.
        ran: The seconds of them in which its process ran.
        own: Whether the time was the service's own limit, not the caller's.
    """
    waited = max(0.0, allowed) - ran
    text = f"{field} was not compiled within {max(allowed, 0):.3g} s"
    if ran >= waited:
        return DeadlineExceededError(f"{text}: it is too complex" if ran else text, field=field)
    text += f": it waited {waited:.2g} s for other grammars and ran {ran:.2g} s"
    return (
        ResourceExhaustedError(text, field=field, retry_after=1.0) if own else DeadlineExceededError(text, field=field)
    )


# Compiles grammars in processes that may be killed while they do, in fair places (``child_pool``).
#
# A caller is a source's salt: one tenant's long compilations delay another's short one by about one slice.
_MEMORY_BYTES = 1 << 30


class CompilePool:
    """Compiles sources in at most ``size`` processes, started when first needed. Lives on one event loop.

    Args:
        special_names: Names of the vocabulary's special tokens.
        size: Most compilations that run at a time.
        max_queued: Most that wait; more are refused.
    """

    def __init__(self, special_names: Sequence[str], size: int = 2, max_queued: int = 256) -> None:
        self._pool = ChildPool(
            "sapwood_common.grammar.compile_process",
            json.dumps(list(special_names)).encode(),
            PoolLimits(size=size, max_queued=max_queued, memory_bytes=_MEMORY_BYTES),
            "too many grammars wait to be compiled",
        )

    async def compile(self, source: GrammarSource, progress: Progress | None = None) -> tuple[str, list[str]]:
        """The compiled text, and what was left out of its lenient schemas. Cancelling the call kills the compilation.

        Args:
            source: What to compile.
            progress: Filled in meanwhile.

        Raises:
            InvalidArgumentError: The grammar is at fault; ``field`` is ``grammar.<kind>``, or the field of the part at fault.
            ResourceExhaustedError: Too many wait already.
        """
        field = f"grammar.{source.kind}"
        question = {
            "kind": source.kind,
            "text": source.text,
            "any_whitespace": source.options.any_whitespace,
            "lenient": source.options.lenient,
        }
        try:
            answer = json.loads(await self._pool.ask(json.dumps(question).encode(), source.salt, progress=progress))
        except ChildDiedError:
            raise InvalidArgumentError("the grammar needs too much memory to compile", field=field) from None
        if "error" in answer:
            raise InvalidArgumentError(
                f"the grammar cannot be compiled: {answer['error']}", field=answer["field"] or field
            )
        return answer["lark"], answer["left_out"]

    async def close(self) -> None:
        """Ends all processes."""
        await self._pool.close()
