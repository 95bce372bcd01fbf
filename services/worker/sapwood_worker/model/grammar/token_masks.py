"""The masks of a step, filled while the model computes.

``start`` hands the matchers to a thread and returns at once; the library fills the rows in parallel over a few cores without
the interpreter's lock. The result is ready by the time the logits are, unless a grammar's lexer is cold.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np
import numpy.typing as npt

from sapwood_worker.model.grammar.matcher import GrammarMatcher
from sapwood_worker.records.grammar_state import GrammarState


class TokenMasks:
    """Implements :class:`~sapwood_worker.records.grammar_state.MaskFiller`; one step at a time.

    Args:
        vocab_size: Columns of the model's logits.
        threads: Cores that fill rows; None lets the library choose.
    """

    def __init__(self, vocab_size: int, threads: int | None = None) -> None:
        self._words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="token-masks")
        self._executor = llguidance.LLExecutor(threads)
        self._buffer: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def start(self, states: Sequence[GrammarState]) -> Future[npt.NDArray[np.int32]]:
        if len(self._buffer) < len(states):
            self._buffer = np.zeros((max(len(states), 2 * len(self._buffer)), self._words), np.int32)
        return self._threads.submit(self._fill, list(states), self._buffer[: len(states)])

    def _fill(self, states: list[GrammarState], rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        batched: list[tuple[llguidance.LLMatcher, int]] = []
        for place, state in enumerate(states):
            if isinstance(state, GrammarMatcher) and len(states) > 1:
                batched.append((state.engine, place))
            else:
                state.fill(rows[place])
        if batched:
            self._executor.unsafe_compute_mask_ptr(batched, rows.ctypes.data, rows.shape[1] * 4, len(rows))
        return rows
