"""Samples the tokens of a step and reports their log probabilities.

The order: log probabilities are taken of the logits as the model gave them; then logit processors, grammar masks, allowed
tokens, banned sequences, penalties, biases and the ban on early ends change them in place; then temperature and the filters of
``sample``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.sampling.cpu_sampling import SamplingBatch
from sapwood_worker.model.sampling.penalties import AllowedTokens, BannedSequences, TokenCounts
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.model.sampling.processors import LogitProcessors
from sapwood_worker.model.sampling.row_settings import RowSettings
from sapwood_worker.records.output import TokenLogprobs
from sapwood_worker.records.step import Entry, IntArray, Step

# Log probabilities of tokens by the model's own distribution: before temperature, penalties, biases and grammar.


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of S tokens and of K alternatives to each.

    Attributes:
        chosen: float32 [S]: the tokens' own.
        top_ids: int64 [S, K]: the likeliest tokens, likeliest first.
        top: float32 [S, K]: their log probabilities.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``chosen``, ``top_ids`` and ``top``."""
        return self.chosen, self.top_ids, self.top

    def to_list(self, alternatives: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """The log probabilities as records; waits for the device.

        Args:
            alternatives: How many of the K are wanted for each token; None: all.
        """
        counts = [self.top.shape[1]] * len(self.chosen) if alternatives is None else alternatives
        columns = zip(self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), counts, strict=True)
        return [TokenLogprobs(chosen, ids[:count], top[:count]) for chosen, ids, top, count in columns]


class Distribution:
    """The log softmax of some rows, kept until it is known which tokens were chosen.

    Args:
        logits: float32 [S, V]; not changed.
        alternatives: K, the number of alternatives.
    """

    def __init__(self, logits: Tensor, alternatives: int) -> None:
        # Not logsumexp: how torch sums on a GPU depends there on the number of rows.
        self._logprobs = logits.log_softmax(-1)
        self._top = logits.topk(alternatives, dim=-1).indices

    def of(self, tokens: Tensor) -> Logprobs:
        """The log probabilities of one token of each row, int64 [S]."""
        chosen = self._logprobs.gather(1, tokens[:, None])
        return Logprobs(chosen[:, 0], self._top, self._logprobs.gather(1, self._top))


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenates parts, at least one, which have the same K."""
    chosen, top_ids, top = (torch.cat(tensors) for tensors in zip(*(part.tensors for part in parts), strict=True))
    return Logprobs(chosen, top_ids, top)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's tokens, still on the device.

    Attributes:
        tokens: int64 [R]; -1 for a row whose logits were not finite numbers, or all forbidden.
        logprobs: Log probabilities of the rows that asked for them.
        rows: The indices of those rows.
        alternatives: How many alternatives each of those rows wants.
        failures: What a logit processor failed with, by the part of the step.
    """

    tokens: Tensor
    logprobs: Logprobs | None = None
    rows: tuple[int, ...] = ()
    alternatives: tuple[int, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict)


class TokenSampler:
    """Samples tokens; keeps the sampling state of each row of the page table.

    Args:
        rows: Rows of the page table.
        vocab_size: Columns of the logits.
        eos_token_ids: The model's end tokens.
        ops: The operations of the logits' device.
        drawing: As :class:`RowSettings` takes it.

    Attributes:
        drawing: The argument.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        ops: DeviceOps,
        drawing: Tensor | None = None,
    ) -> None:
        self.drawing = drawing
        self._settings = RowSettings(rows, vocab_size, eos_token_ids, ops, drawing)
        self._counts = TokenCounts(rows, vocab_size, ops)
        self._allowed = AllowedTokens(rows, vocab_size, ops)
        self._banned = BannedSequences(rows, ops)
        self._processors = LogitProcessors(vocab_size, eos_token_ids)
        self._ops = ops

    def enter(self, entry: Entry) -> None:
        """Gives a row of the page table to a request."""
        row, params = entry.row, entry.sampling
        self._settings.enter(row, params, entry.output_start)
        tokens = array("I", entry.tokens)
        if params.allowed_token_ids:
            self._allowed.enter(row, params.allowed_token_ids)
        if params.bad_words_ids:
            self._banned.enter(row, params.bad_words_ids, tokens[entry.output_start :])
        if params.logit_processors:
            self._processors.enter(row, params.logit_processors, tokens, entry.output_start)
        if self._settings.penalised(row):
            self._counts.enter(row, tokens, entry.output_start)

    def publish(self) -> None:
        """Has graphs that are replayed from now on draw by the settings of the requests that have entered."""
        self._settings.publish()

    def greedy(self, rows: IntArray) -> bool:
        """Whether the requests in these rows of the page table want the likeliest token and nothing else."""
        return self._settings.plain(rows)

    def looks_back(self, rows: IntArray) -> bool:
        """Whether any request in these rows of the page table has tokens chosen by those before them, too."""
        return self._settings.looks_back(rows)

    def sample(
        self,
        logits: Tensor,
        step: Step,
        at: Positions,
        greedy: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> SampledTokens:
        """One token for each position, without waiting for the device.

        Args:
            logits: [R, V], contiguous; float32 ones are changed in place.
            step: The step; its grammar masks are waited for.
            at: The positions that it samples, at least one.
            greedy: Each row's likeliest token, -1 where there is none, if they are known already.
            drawn: Each row's token, sampled with its request's settings, likewise.
        """
        settings, drafts = self._settings, at.drafts
        if step.masks is None and settings.drawn(at.rows):
            plain = settings.plain(at.rows)
            if (known := greedy if plain else drawn) is not None:
                return SampledTokens(known)
            if self.drawing is not None and self._ops.captures:
                return SampledTokens(self._draw(logits, at))
            if plain:
                return SampledTokens(self._ops.row_max(logits)[1])
        logits = logits.float()  # all that follows changes logits or needs their full precision
        wanted = settings.logprobs(at.rows)
        distribution = None
        if wanted is not None:
            chosen = self._ops.to_device(wanted[0])
            distribution = Distribution(logits.index_select(0, chosen), int(wanted[1].max()))
        failures: dict[int, str] = {}
        if (processed := settings.processed(at.rows)) is not None:
            failures = self._processors.apply(logits, processed, step, at)
        apply_masks(logits, step, self._ops)
        if (places := settings.allowed(at.rows)) is not None:
            self._allowed.apply(logits, places)
        if (banned := settings.banned(at.rows)) is not None:
            self._banned.apply(logits, banned, drafts)
        if (penalties := settings.penalties(at.rows)) is not None:
            self._counts.apply(logits, penalties, drafts)
        for each in settings.additions(at.rows, at.positions):
            logits.view(-1).scatter_add_(0, each.at, each.values)
        chosen_tokens, largest = sample(logits, settings.sampling(at.rows, at.positions), self._ops)
        tokens, counted = _valid(chosen_tokens, largest), chosen_tokens
        if drafts is not None and (penalties is not None or banned is not None):
            counted = drafts.counting(tokens, drafts.ends(tokens, self._ops), self._ops)
        if penalties is not None:
            self._counts.add(counted, penalties, drafts)
        if banned is not None:
            self._banned.add(counted, banned, drafts)
        if distribution is None or wanted is None:
            return SampledTokens(tokens, failures=failures)
        logprobs = distribution.of(chosen_tokens.index_select(0, chosen))
        return SampledTokens(tokens, logprobs, tuple(wanted[0].tolist()), tuple(wanted[1].tolist()), failures)

    def _draw(self, logits: Tensor, at: Positions) -> Tensor:
        """As a graph does, by the kernels that are compiled for it."""
        assert self.drawing is not None
        slots, positions = self._ops.to_device(np.stack((at.rows, at.positions - 1)))
        return self._ops.draw_rows(logits, self.drawing, slots, positions)[1]


def _valid(tokens: Tensor, largest: Tensor) -> Tensor:
    # Two launches where isfinite() takes four.
    return torch.where(largest.abs() < float("inf"), tokens, -1)


def apply_masks(logits: Tensor, step: Step, ops: DeviceOps) -> None:
    """Forbids, in place, what the grammars of a step's requests forbid. Waits until their masks are filled.

    Args:
        logits: float [R, V], one row for each position that the step samples.
        step: The step.
        ops: The operations of the logits' device.
    """
    if step.masks is None:
        return
    bitmask = ops.to_device(step.masks.result())
    rows = None if len(step.masked) == len(logits) else ops.to_device(step.masked)
    ops.forbid_tokens(logits, bitmask, rows)


# Chooses the next token of every row at once.
#
# Order of the filters: temperature; top-k; top-p over what top-k left, renormalised; min-p relative to the likeliest
# token. Each filter is a threshold on the probability, so tokens exactly as likely as the last one kept are kept too,
# and the result does not depend on how a sort breaks ties.
#
# The token is then drawn by the row's random numbers, down a tree (``cpu_sampling``). Nothing in a row's result depends
# on another row: it is a pure function of (seed, position, logits), and logits that are rounded a little otherwise
# seldom change it.
#
# How the draw is computed is the device's own: torch calls (``cpu_sampling`` of ``sapwood_kernels.sampling``), or one
# kernel that does all of it without waiting for the host (``triton_sampling``).
def sample(logits: Tensor, batch: SamplingBatch | None, ops: DeviceOps) -> tuple[Tensor, Tensor]:
    """Samples each row.

    Args:
        logits: float32 [R, V]; not changed.
        batch: Settings; None when all rows are greedy.
        ops: The device's operations.

    Returns:
        Token ids, int64 [R], and each row's largest logit, float32 [R]. Where that is not finite the row holds a NaN, an
        infinity or nothing to choose, and its token, in the vocabulary, means nothing.
    """
    largest, greedy = ops.row_max(logits)
    if batch is None:
        return greedy.clamp(min=0), largest
    chosen = ops.sample_rows(logits, largest, batch)
    return (chosen if batch.rows is None else greedy.clamp(min=0).index_copy_(0, batch.rows, chosen)), largest
