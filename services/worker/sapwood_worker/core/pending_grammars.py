"""Requests whose grammar is being built: they are scheduled once it is there, and delay no other request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from sapwood_common.errors import SapwoodError
from sapwood_worker.model.grammar.backend import GrammarBackend
from sapwood_worker.records.grammar_state import GrammarState

ItemT = TypeVar("ItemT")


class PendingGrammars(Generic[ItemT]):
    """Builds matchers in threads. The methods are called from one thread, the loop's.

    Args:
        backend: Makes them.
        threads: How many matchers are built at a time.
    """

    def __init__(self, backend: GrammarBackend, threads: int = 2) -> None:
        self._backend = backend
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._pending: dict[int, tuple[ItemT, Future[GrammarState]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, serial: int, item: ItemT, compiled: bytes, generated: Sequence[int]) -> None:
        """Begins to build; :meth:`poll` gives ``item`` back with the result."""
        self._pending[serial] = (item, self._threads.submit(self._backend.build, compiled, generated))

    def abort(self, serial: int) -> bool:
        """Forgets a request; returns whether it was here."""
        found = self._pending.pop(serial, None)
        if found is not None:
            found[1].cancel()  # if it runs already, its matcher is dropped
        return found is not None

    def poll(self, wait_seconds: float) -> list[tuple[ItemT, GrammarState | SapwoodError]]:
        """Items whose grammar is done since the last call, in the order of their start; waits at most so long for one."""
        if wait_seconds:
            wait([future for _, future in self._pending.values()], wait_seconds, FIRST_COMPLETED)
        done = [serial for serial, (_, future) in self._pending.items() if future.done()]
        results: list[tuple[ItemT, GrammarState | SapwoodError]] = []
        for serial in done:
            item, future = self._pending.pop(serial)
            try:
                results.append((item, future.result()))
            except SapwoodError as error:
                results.append((item, error))
        return results
