"""Logit processors: functions that packages bring as entry points of ``LOGIT_PROCESSORS`` and that requests name.

An entry point is a ``MakeProcessor``. It is called once for each request, and again when the request continues after a
retraction or on another worker. It checks the parameters; what it returns is called once for each token. Both have to be
functions of their arguments
alone: so the output does not depend on batches, and all ranks of a group, each of which calls them, choose the same token.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sapwood_common.contract.sampling import LogitProcessorCall
from sapwood_common.plugins import find_part
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.records.step import IntArray, Step

LOGIT_PROCESSORS = "sapwood.logit_processors"
"""The group of entry points."""

logger = logging.getLogger(__name__)

LogitProcessor = Callable[[Tensor, Sequence[int]], Tensor]
"""Takes the logits of the next token, float32 [V], which it may change in place, and the output's token ids so far; returns the
logits to sample from. Whatever it raises ends its request."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """The facts about its request and the model that a processor may use.

    Attributes:
        prompt: Token ids.
        vocab_size: Number of logits.
        eos_token_ids: The model's end tokens.
    """

    prompt: Sequence[int]
    vocab_size: int
    eos_token_ids: tuple[int, ...]


MakeProcessor = Callable[[Mapping[str, Any], Prompted], LogitProcessor]
"""Makes a request's processor of its JSON parameters; raises ``ValueError`` where they are wrong."""


class _Row:
    """A row of the page table whose request has processors."""

    __slots__ = ("chain", "failure", "output_start", "tokens")

    def __init__(self, tokens: array[int], output_start: int) -> None:
        self.tokens = tokens
        self.output_start = output_start
        self.chain: list[tuple[str, LogitProcessor]] = []
        self.failure = ""


class LogitProcessors:
    """Calls the processors of a step's rows, on the host and one row after another.

    Args:
        vocab_size: Columns of the logits.
        eos_token_ids: The model's end tokens.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._ends = tuple(eos_token_ids)
        self._rows: dict[int, _Row] = {}

    def enter(self, row: int, calls: Sequence[LogitProcessorCall], tokens: array[int], output_start: int) -> None:
        """Makes the processors of a row; a failure is reported when the row would sample.

        Args:
            row: The row of the page table.
            calls: The processors that its request asks for.
            tokens: Prompt and output so far.
            output_start: Where the output begins.
        """
        state = self._rows[row] = _Row(tokens, output_start)
        given = Prompted(tokens[:output_start], self._vocab_size, self._ends)
        for call in calls:
            try:
                make: MakeProcessor = find_part(LOGIT_PROCESSORS, call.name, {})
                state.chain.append((call.name, make(call.parameters, given)))
            except Exception as error:
                state.failure = f"logit processor {call.name!r} refuses its parameters: {_readable(error)}"
                return

    def apply(self, logits: Tensor, places: IntArray, step: Step, at: Positions) -> dict[int, str]:
        """Changes rows of the logits in place.

        Args:
            logits: float32 [R, V].
            places: int64 [S]: the rows that have processors. None of them has a draft.
            step: The step, all of whose tokens are known.
            at: The positions that it samples.

        Returns:
            The errors, by the part of the step; that part's logits are then NaN.
        """
        failures: dict[int, str] = {}
        firsts = step.counts.cumsum() - step.counts
        for place in places.tolist():
            part = at.parts[place if at.drafts is None else int(at.drafts.owner[place])]
            state = self._rows[int(at.rows[place])]
            if part < len(firsts):  # a request that has joined the step has entered with all its tokens
                start, first, count = int(step.starts[part]), int(firsts[part]), int(step.counts[part])
                del state.tokens[start:]
                state.tokens.extend(step.token_ids[first : first + count].tolist())
            failure = state.failure or _run(state, logits[place])
            if failure:
                failures[part] = failure
                logits[place] = torch.nan
        return failures


def _run(state: _Row, logits: Tensor) -> str:
    """Calls a row's processors; returns why one failed."""
    output = state.tokens[state.output_start :]
    result = logits
    for name, processor in state.chain:
        try:
            result = processor(result, output)
            if not isinstance(result, Tensor) or result.shape != logits.shape:
                raise TypeError(f"it has to return {len(logits)} logits")
        except Exception as error:
            logger.warning("logit processor %r failed", name, exc_info=error)
            return f"logit processor {name!r} failed: {_readable(error)}"
    if result is not logits:
        logits.copy_(result)
    return ""


def _readable(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
