"""Runs a draft model or a head: several tokens without the host in between, and what follows a check before it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sapwood_worker.model.runner.drafts.follow_up import FollowUp
from sapwood_worker.model.runner.graphs.cuda_graph import DecodeResult
from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows
from sapwood_worker.model.runner.graphs.late_tokens import DraftedTokens
from sapwood_worker.model.runner.launched_step import LaunchedStep
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.model.sampling.token_sampler import SampledTokens
from sapwood_worker.records.step import DeferredStep, IntArray, Step

logger = logging.getLogger(__name__)


class DraftingRunner(ModelRunner):
    """A runner whose model drafts for another one, on the same rows of the page table.

    Args:
        parts: As :class:`ModelRunner` takes them.

    Attributes:
        taken: Steps that were computed already, behind the check before.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.taken = 0
        self._follows = True
        self._followed: FollowUp | None = None

    @torch.inference_mode()
    def launch_chain(self, first: Step, wanted: IntArray) -> DraftedTokens | None:
        """Begins a step and decodes that follow each other, each of the tokens of the one before, where the host need not wait
        for any of them.

        Args:
            first: Samples a token of each of P requests; their pages reach to the last decode's.
            wanted: int64 [P]: in how many decodes each is to be, at least one of them in one.

        Returns:
            The tokens, int64 [(1 + most wanted) * P], the first step's first; of a request that has ended undefined. None:
            nothing was begun, launch the steps one by one.
        """
        for entry in first.entries:
            self._enter(entry)
        if self._graphs is None:
            return None
        begun, one = self.ops.moment(), np.ones(len(first.rows), np.int64)
        decodes = replace(first, starts=first.starts + first.counts, counts=one, token_ids=-one, entries=())
        rows = self._rows(self._graphs, decodes, prompts=True)
        if rows is None or not self._graphs.chains(rows, wanted):
            return None
        taken = self._take_followed(first)
        if taken is None:
            super()._launch(first)
            latest = self._last_tokens.index_select(0, self.ops.to_device(first.rows))
        else:
            latest = taken.tokens
        choose = None if self._sampler.greedy(first.rows) else self._chooser(decodes)
        return DraftedTokens([latest, *self._graphs.chain(rows, wanted, choose)], self.ops, begun)

    def _chooser(self, decodes: Step) -> Callable[[int, DecodeResult], Tensor]:
        """Draws as many positions after these decodes as it is told, from what came of them there."""
        at = Positions.of(decodes)

        def choose(place: int, result: DecodeResult) -> Tensor:
            there = replace(at, positions=at.positions + place)
            return self._sampler.sample(result.logits, decodes, there, result.greedy).tokens

        return choose

    @torch.inference_mode()
    def follow(self, step: Step, rows: DecodeRows, tokens: Tensor) -> None:
        if self._shifted is None or not self._follows or self._graphs is None or len(tokens) > self._graphs.largest:
            return
        nowhere = np.full(len(tokens), self._pool.scratch_slots()[0])
        late = self._graphs.columns[: len(tokens)], tokens
        try:
            result = self._graphs.run(replace(rows, left=nowhere), late=late)
        except Exception:  # the check itself is on its way
            logger.exception("the head failed behind a check; it computes nothing there any more")
            self._follows = False
            return
        self._followed = FollowUp(step.rows, step.starts, step.counts, result)

    def forget(self) -> None:
        self._followed = None

    def _launch(self, step: Step) -> LaunchedStep | DeferredStep:
        tokens = self._take_followed(step)
        if tokens is None:
            return super()._launch(step)
        return LaunchedStep(step, Positions.of(step), tokens, {}, self._copied, self.ops)

    def _take_followed(self, step: Step) -> SampledTokens | None:
        """The tokens of a step that was computed behind the last check, and all that it leaves; None: it was not."""
        followed, self._followed = self._followed, None
        ends = None if followed is None else followed.ends(step)
        if followed is None or ends is None:
            return None
        result, shifted = followed.result, self._shifted
        assert result.hidden is not None and shifted is not None
        left = shifted.left(step)[np.cumsum(step.counts) - 1]
        places, slots, rows = self.ops.to_device(np.stack((ends, left, step.rows)))
        shifted.leave(result.hidden.index_select(0, places), slots)
        if self._sampler.greedy(step.rows):
            tokens = SampledTokens(result.greedy.index_select(0, places))
        else:
            tokens = self._sampler.sample(result.logits.index_select(0, places), step, Positions.of(step))
        self._keep(tokens, rows)
        self.taken += 1
        return tokens
