"""The masks of a step, filled while the model computes.

``start`` hands the states to a thread and returns at once; the libraries fill rows without the interpreter's lock, and a backend
may fill many in parallel. The result is ready by the time the logits are, unless a grammar is cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from sapwood_worker.records.grammar_state import GrammarState

FillTogether = Callable[[Sequence[tuple[GrammarState, int]], npt.NDArray[np.int32]], None]
"""Fills the row at each state's index."""


class TokenMasks:
    """Implements :class:`~sapwood_worker.records.grammar_state.MaskFiller`; one step at a time.

    Args:
        columns: Width of a mask, as the grammar backend says.
        together: Fills the rows of several states at once; None: they are filled one after another.
    """

    def __init__(self, columns: int, together: FillTogether | None = None) -> None:
        self._words = -(-columns // 32)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        self._together = together
        self._buffer: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def start(
        self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]] = ()
    ) -> Future[npt.NDArray[np.int32]]:
        rows = len(states) + sum(map(len, drafts))
        if len(self._buffer) < rows:
            self._buffer = np.zeros((max(rows, 2 * len(self._buffer)), self._words), np.int32)
        return self._threads.submit(self._fill, list(states), drafts or [()] * len(states), self._buffer[:rows])

    def _fill(
        self, states: list[GrammarState], drafts: Sequence[Sequence[int]], rows: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        batched: list[tuple[GrammarState, int]] = []
        place = 0
        for state, draft in zip(states, drafts, strict=True):
            if draft:
                _fill_drafted(state, draft, rows[place : place + 1 + len(draft)])
            elif self._together is not None and len(states) > 1:
                batched.append((state, place))
            else:
                state.fill(rows[place])
            place += 1 + len(draft)
        if self._together is not None and batched:
            self._together(batched, rows)
        return rows


def _fill_drafted(state: GrammarState, draft: Sequence[int], rows: npt.NDArray[np.int32]) -> None:
    """Fills a row before each token of a draft and one after it. A token after which the state fails ends it: what follows is
    forbidden, and the state fails again when that token comes as output."""
    taken = 0
    rows[1:] = 0
    state.fill(rows[0])
    for token in draft:
        if not state.accept(token):
            break
        taken += 1
        state.fill(rows[taken])
    state.rollback(taken)
