"""The sampling settings of the page table's rows, as arrays: written when a row gets a new request, gathered in each step.

So a step costs a few numpy calls, independent of the number of requests and their settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.sampling.cpu_sampling import SETTINGS, SamplingBatch, levels, uniform
from sapwood_worker.model.sampling.penalties import Penalties, Places
from sapwood_worker.records.step import IntArray

_SEED_MASK = (1 << 64) - 1
# The kinds of settings that a row has, as bits.
_SAMPLED, _PENALISED, _BIASED, _MINIMUM, _LOGPROBS, _ALLOWED, _BANNED, _PROCESSED = (1 << bit for bit in range(8))


@dataclass(frozen=True, slots=True)
class Additions:
    """Numbers to add to single logits.

    Attributes:
        at: int64 [N]: indices into the flattened logits; if one comes several times, all but one of its values are 0.
        values: float32 [N].
    """

    at: Tensor
    values: Tensor


class RowSettings:
    """Settings of R rows.

    Args:
        rows: R.
        vocab_size: Columns of the logits.
        eos_token_ids: The model's end tokens.
        ops: The operations of the device that tensors go to.
        drawing: int64 [R, ``SETTINGS``] on the device: what a draw takes of each row's settings, for graphs; None: there are
            none.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        ops: DeviceOps,
        drawing: Tensor | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._ends = tuple(eos_token_ids)
        self._ops = ops
        self._drawing = drawing
        self._drawn_by = np.zeros((rows, SETTINGS), np.int64)
        self._entered = False
        self._asks = np.zeros(rows, np.uint8)
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.zeros(rows, np.float64)
        self._min_p = np.zeros(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        # Columns: frequency, presence, repetition.
        self._penalties = np.zeros((rows, 3), np.float32)
        self._free_from = np.zeros(rows, np.int64)
        self._logprobs = np.zeros(rows, np.int64)
        # Token ids and what is added to their logits; rows are padded with token 0 and 0.0.
        self._bias_ids, self._bias = np.zeros((rows, 1), np.int64), np.zeros((rows, 1), np.float32)
        self._end_ids, self._end_bias = np.zeros((rows, 1), np.int64), np.zeros((rows, 1), np.float32)

    def enter(self, row: int, params: SamplingParams, output_start: int) -> None:
        """Gives a row a request's settings; ``output_start`` is the position of its first token of output."""
        penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        self._asks[row] = (
            _SAMPLED * (params.temperature > 0)
            | _PENALISED * (penalties != (0.0, 0.0, 1.0))
            | _BIASED * bool(params.logit_bias)
            | _MINIMUM * (params.min_tokens > 0)
            | _LOGPROBS * (params.logprobs is not None)
            | _ALLOWED * bool(params.allowed_token_ids)
            | _BANNED * bool(params.bad_words_ids)
            | _PROCESSED * bool(params.logit_processors)
        )
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = params.seed & _SEED_MASK
        floats = self._drawn_by.view(np.float64)
        floats[row, 0], floats[row, 2:4] = self._temperature[row], (params.top_p, self._min_p[row])
        self._drawn_by[row, 1], self._drawn_by[row, 4] = self._top_k[row], self._seed[row].astype(np.int64)
        self._entered = True
        self._penalties[row] = penalties
        self._free_from[row] = output_start + params.min_tokens
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        if params.logit_bias:
            ids, values = tuple(params.logit_bias), tuple(params.logit_bias.values())
            self._bias_ids, self._bias = _fill(self._bias_ids, self._bias, row, ids, values)
        if params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._ends)}
            self._end_ids, self._end_bias = _fill(self._end_ids, self._end_bias, row, tuple(ends), -np.inf)

    def publish(self) -> None:
        """Moves what rows have been given since the last call to where graphs read it, in the order of the device's work."""
        if self._entered and self._drawing is not None:
            self._ops.fill(self._drawing, self._drawn_by.copy())
        self._entered = False

    def penalised(self, row: int) -> bool:
        """Whether the row's request has penalties."""
        return bool(self._asks[row] & _PENALISED)

    def plain(self, rows: IntArray) -> bool:
        """Whether all of these rows want the likeliest token and nothing else."""
        return not self._asks[rows].any()

    def drawn(self, rows: IntArray) -> bool:
        """Whether all of these rows want a token by temperature, top-k, top-p and min-p, or the likeliest, and nothing else."""
        return not (self._asks[rows] & ~np.uint8(_SAMPLED)).any()

    def looks_back(self, rows: IntArray) -> bool:
        """Whether any of these has penalties, banned sequences or logit processors, which ask for the tokens before."""
        return bool((self._asks[rows] & (_PENALISED | _BANNED | _PROCESSED)).any())

    def sampling(self, rows: IntArray, positions: IntArray) -> SamplingBatch | None:
        """The settings of those of a step's rows that are not greedy; None if all are.

        Args:
            rows: int64 [B].
            positions: int64 [B]: the position that each row's token will have.
        """
        at, rows = self._asking(rows, _SAMPLED)
        if at is None:
            return None
        top_k, top_p = self._top_k[rows], self._top_p[rows]
        limited = top_k[top_k < self._vocab_size]
        return SamplingBatch(
            rows=self._move(at) if len(at) < len(positions) else None,
            count=len(at),
            temperature=self._move(self._temperature[rows])[:, None],
            top_k=self._move(top_k)[:, None],
            top_p=self._move(top_p)[:, None],
            min_p=self._move(self._min_p[rows])[:, None],
            uniform=self._move(uniform(self._seed[rows], positions[at], levels(self._vocab_size))),
            most_k=int(limited.max()) if len(limited) else 0,
            any_top_p=bool((top_p < 1.0).any()),
        )

    def penalties(self, rows: IntArray) -> Penalties | None:
        """The penalties of a step's rows; None if there are none."""
        at, rows = self._asking(rows, _PENALISED)
        if at is None:
            return None
        frequency, presence, repetition = self._move(self._penalties[rows]).chunk(3, dim=1)
        return Penalties(at, self._move(at), self._move(rows), frequency, presence, repetition)

    def additions(self, rows: IntArray, positions: IntArray) -> list[Additions]:
        """What is added to the logits of a step's rows: biases, and minus infinity to end tokens that may not come yet."""
        result = []
        at, biased = self._asking(rows, _BIASED)
        if at is not None:
            result.append(self._additions(at, self._bias_ids[biased], self._bias[biased]))
        at, minimum = self._asking(rows, _MINIMUM)
        if at is not None:
            early = positions[at] < self._free_from[minimum]
            if early.any():
                result.append(self._additions(at[early], self._end_ids[minimum[early]], self._end_bias[minimum[early]]))
        return result

    def logprobs(self, rows: IntArray) -> tuple[IntArray, IntArray] | None:
        """Which of a step's rows want log probabilities, and the number of alternatives of each; None if none does."""
        at, rows = self._asking(rows, _LOGPROBS)
        return None if at is None else (at, self._logprobs[rows])

    def allowed(self, rows: IntArray) -> Places | None:
        """Which of a step's rows have only some tokens to choose from; None if none has."""
        return self._places(rows, _ALLOWED)

    def banned(self, rows: IntArray) -> Places | None:
        """Which of a step's rows have banned sequences; None if none has."""
        return self._places(rows, _BANNED)

    def processed(self, rows: IntArray) -> IntArray | None:
        """Which of a step's rows have logit processors; None if none has."""
        return self._asking(rows, _PROCESSED)[0]

    def _places(self, rows: IntArray, what: int) -> Places | None:
        at, rows = self._asking(rows, what)
        return None if at is None else Places(at, self._move(at), self._move(rows))

    def _asking(self, rows: IntArray, what: int) -> tuple[IntArray | None, IntArray]:
        at = np.flatnonzero(self._asks[rows] & what)
        return (at, rows[at]) if len(at) else (None, rows)

    def _additions(self, at: IntArray, ids: IntArray, values: npt.NDArray[np.float32]) -> Additions:
        flat = at[:, None] * self._vocab_size + ids
        return Additions(self._move(flat.ravel()), self._move(values.ravel()))

    def _move(self, array: npt.NDArray[Any]) -> Tensor:
        return self._ops.to_device(array)


def _fill(
    ids: IntArray, values: npt.NDArray[np.float32], row: int, new_ids: Sequence[int], new_values: Any
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Writes a row of the two arrays, which become wider where it needs more columns."""
    missing = len(new_ids) - ids.shape[1]
    if missing > 0:
        ids, values = np.pad(ids, ((0, 0), (0, missing))), np.pad(values, ((0, 0), (0, missing)))
    ids[row], values[row] = 0, 0.0
    ids[row, : len(new_ids)], values[row, : len(new_ids)] = new_ids, new_values
    return ids, values
