"""Compiles grammars for a service, each once, within bounds, and keeps the artefacts.

Bounds: the source's size; a deadline for each caller; the processes of the pool; a budget of bytes for artefacts (the least
recently used one goes first; each costs its bytes and 256 more). Callers with the same grammar share one compilation, which is
killed when the last of them has gone. O(1) for a hit.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from sapwood_common.errors import DeadlineExceededError, InvalidArgumentError
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile_pool import CompilePool
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


@dataclass(slots=True)
class _Job:
    task: asyncio.Task[bytes]
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
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self.cached_bytes = 0

    def find(self, source: GrammarSource) -> bytes | None:
        """The artefact if it is kept; counts as a use."""
        key = source.key(self._fingerprint)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    async def compile(self, source: GrammarSource, timeout: float | None = None) -> bytes:
        """The serialised :class:`~sapwood_common.grammar.artefact.GrammarArtefact`.

        Args:
            source: What to compile.
            timeout: The caller's own time, in seconds; the earlier of it and the compiler's counts.

        Raises:
            InvalidArgumentError: The grammar is too large, malformed, or cannot be enforced; its field is named.
            DeadlineExceededError: It took too long; the compilation is killed unless others wait for it.
            ResourceExhaustedError: Too many grammars wait to be compiled.
        """
        field = f"grammar.{source.kind}"
        size = len(source.text.encode())
        if size > self._limits.max_source_bytes:
            raise InvalidArgumentError(
                f"the grammar has {size} bytes; at most {self._limits.max_source_bytes} are compiled", field=field
            )
        kept = self.find(source)
        if kept is not None:
            return kept
        allowed = self._limits.timeout if timeout is None else min(timeout, self._limits.timeout)
        try:
            async with asyncio.timeout(allowed):
                return await self._join(source)
        except TimeoutError:
            raise DeadlineExceededError(
                f"{field} was not compiled within {max(allowed, 0):.3g} s: it is too complex", field=field
            ) from None

    async def close(self) -> None:
        """Ends all compilations."""
        for job in self._jobs.values():
            job.task.cancel()
        await self._pool.close()

    async def _join(self, source: GrammarSource) -> bytes:
        key = source.key(self._fingerprint)
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(asyncio.create_task(self._run(key, source)))
        job.waiters += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiters -= 1
            if job.waiters == 0 and not job.task.done():
                job.task.cancel()
                # A caller that comes now must not join what is being killed.
                if self._jobs.get(key) is job:
                    del self._jobs[key]

    async def _run(self, key: bytes, source: GrammarSource) -> bytes:
        job = self._jobs[key]
        try:
            artefact = GrammarArtefact.of(source, self._fingerprint, await self._pool.compile(source)).to_bytes()
        finally:
            if self._jobs.get(key) is job:
                del self._jobs[key]
        self._keep(key, artefact)
        return artefact

    def _keep(self, key: bytes, artefact: bytes) -> None:
        cost = len(artefact) + _ENTRY_OVERHEAD
        if cost > self._limits.cache_bytes:
            return
        self._kept[key] = artefact
        self.cached_bytes += cost
        while self.cached_bytes > self._limits.cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.cached_bytes -= len(oldest) + _ENTRY_OVERHEAD
