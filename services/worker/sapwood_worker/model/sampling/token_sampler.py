"""From a step's logits to its tokens: grammar, penalties, biases, the draw, and log probabilities.

The order: log probabilities are taken of the logits as the model gave them; then grammar masks, allowed tokens, banned sequences,
penalties, biases and the ban on early ends change them in place; then temperature and the filters of ``sampler.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.grammar.logit_masks import StepMasks
from sapwood_worker.model.sampling.bans import AllowedTokens, BannedSequences
from sapwood_worker.model.sampling.logprobs import Distribution, Logprobs
from sapwood_worker.model.sampling.penalties import TokenCounts
from sapwood_worker.model.sampling.row_settings import IntArray, RowSettings
from sapwood_worker.model.sampling.sampler import sample
from sapwood_worker.records.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's tokens, still on the device.

    Attributes:
        tokens: int64 [R]; -1 for a row whose logits were not finite numbers, or all forbidden.
        logprobs: Log probabilities of the rows that asked for them.
        rows: The indices of those rows.
        alternatives: How many alternatives each of those rows wants.
    """

    tokens: Tensor
    logprobs: Logprobs | None = None
    rows: tuple[int, ...] = ()
    alternatives: tuple[int, ...] = ()


class TokenSampler:
    """Samples tokens; keeps the sampling state of each row of the page table.

    Args:
        rows: Rows of the page table.
        vocab_size: Columns of the logits.
        eos_token_ids: The model's end tokens.
        ops: The operations of the logits' device.
    """

    def __init__(self, rows: int, vocab_size: int, eos_token_ids: Sequence[int], ops: DeviceOps) -> None:
        self._settings = RowSettings(rows, vocab_size, eos_token_ids, ops)
        self._counts = TokenCounts(rows, vocab_size, ops)
        self._allowed = AllowedTokens(rows, vocab_size, ops)
        self._banned = BannedSequences(rows, ops)
        self._admissions = np.full(rows, -1, np.int64)
        self._ops = ops

    def sample(
        self,
        logits: Tensor,
        requests: Sequence[ScheduledRequest],
        masks: StepMasks,
        greedy: tuple[Tensor, Tensor] | None = None,
    ) -> SampledTokens:
        """One token for each request, without waiting for the device.

        Args:
            logits: [R, V], contiguous; float32 ones are changed in place.
            requests: Each row's request.
            masks: The rows' grammar masks.
            greedy: Each row's largest logit and its token, if they are known already.
        """
        slots, positions = self._enter(requests)
        settings = self._settings
        if settings.plain(slots) and not masks:
            largest, tokens = greedy if greedy is not None else self._ops.row_max(logits)
            return SampledTokens(_valid(tokens, largest))
        logits = logits.float()  # all that follows changes logits or needs their full precision
        wanted = settings.logprobs(slots)
        distribution = None
        if wanted is not None:
            at = self._ops.to_device(wanted[0])
            distribution = Distribution(logits.index_select(0, at), int(wanted[1].max()))
        masks.apply(logits)
        if (places := settings.allowed(slots)) is not None:
            self._allowed.apply(logits, *places)
        if (banned := settings.banned(slots)) is not None:
            self._banned.apply(logits, *banned)
        penalties = settings.penalties(slots)
        if penalties is not None:
            self._counts.apply(logits, penalties)
        for each in settings.additions(slots, positions):
            logits.view(-1).scatter_add_(0, each.at, each.values)
        tokens, largest = sample(logits, settings.sampling(slots, positions), self._ops)
        if penalties is not None:
            self._counts.add(tokens, penalties)
        if banned is not None:
            self._banned.add(tokens, *banned)
        if distribution is None or wanted is None:
            return SampledTokens(_valid(tokens, largest))
        logprobs = distribution.of(tokens.index_select(0, at))
        return SampledTokens(_valid(tokens, largest), logprobs, tuple(wanted[0].tolist()), tuple(wanted[1].tolist()))

    def _enter(self, requests: Sequence[ScheduledRequest]) -> tuple[IntArray, IntArray]:
        """The rows of the page table, and the positions of the tokens to come; writes the state of rows with a new request."""
        count = len(requests)
        slots = np.fromiter((request.slot for request in requests), np.int64, count)
        positions = np.fromiter((request.start + len(request.token_ids) for request in requests), np.int64, count)
        admissions = np.fromiter((request.admission for request in requests), np.int64, count)
        new = (self._admissions[slots] != admissions) | (admissions < 0)
        for index in np.flatnonzero(new).tolist():
            request = requests[index]
            params = request.sampling
            self._settings.enter(request.slot, params, request.output_start)
            if params.allowed_token_ids:
                self._allowed.enter(request.slot, params.allowed_token_ids)
            if params.bad_words_ids:
                self._banned.enter(request.slot, params.bad_words_ids, request.history[request.output_start :])
            if self._settings.penalised(request.slot):
                self._counts.enter(request.slot, request.history, request.output_start)
        self._admissions[slots] = admissions
        return slots, positions


def _valid(tokens: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest.isfinite(), tokens, -1)
