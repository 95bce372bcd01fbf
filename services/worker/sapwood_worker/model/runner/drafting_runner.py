"""Runs a draft model or a head: several tokens without the host in between, and the draft after a check before the check is
over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.runner.graphs.cuda_graph import DecodeResult
from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows, DraftedTokens, LateStart
from sapwood_worker.model.runner.model_runner import LaunchedStep, ModelRunner
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.model.sampling.token_sampler import SampledTokens
from sapwood_worker.records.step import LATE, DeferredStep, Entry, IntArray, Step

logger = logging.getLogger(__name__)


class DraftingRunner(ModelRunner):
    """A runner whose model drafts for another one, on the same rows of the page table.

    Args:
        parts: As :class:`ModelRunner` takes them.

    Attributes:
        taken: How many steps were computed already, behind the check before.
        ahead: How many drafts were computed ahead.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.taken = self.ahead = 0
        self._follows = True
        self._followed: FollowUp | None = None
        self._ahead: DraftAhead | None = None
        self._room: DraftRoom | None = None  # behind the next step that the model launches
        self._room_now: DraftRoom | None = None

    @torch.inference_mode()
    def launch_chain(self, first: Step, wanted: IntArray, reach: IntArray) -> DraftedTokens | None:
        """Begins a step and then decodes in sequence, each with the tokens of the one before, without waiting on the host.

        Args:
            first: The step, which samples a token of each of P requests; their pages reach to the token of the last decode.
            wanted: int64 [P]: in how many decodes each request takes part; at least one request takes part in one.
            reach: int64 [P]: tokens that the requests' pages hold; ``first`` may name more pages than these decodes need.

        Returns:
            At least (1 + most wanted) * P tokens, int64, those of the first step first; undefined for a request that has ended.
            None: nothing was begun; launch the steps one by one.
        """
        for entry in first.entries:
            self._enter(entry)
        self._sampler.publish()
        if self._graphs is None:
            return None
        steps, ahead = int(wanted.max()), self._ahead
        if self._shifted is not None:
            reach = np.minimum(reach, first.pages.shape[1] * self._pool.page_size)
            self._room = DraftRoom(first.rows, first.pages, reach, steps)
        there = None if ahead is None else ahead.decodes(first, wanted)
        if ahead is not None and there == steps:
            self.taken, self.ahead, self._ahead = self.taken + 1, self.ahead + 1, None
            ahead.tokens.share = (1 + steps) / (1 + ahead.room.steps)
            return ahead.tokens
        begun, one = self.ops.moment(), np.ones(len(first.rows), np.int64)
        decodes = replace(first, starts=first.starts + first.counts, counts=one, token_ids=-one, entries=())
        rows = self._rows(self._graphs, decodes, prompts=True)
        if rows is None or not self._graphs.chains(rows, steps):
            return None
        if ahead is not None and there is not None:
            self.taken, self.ahead, self._ahead = self.taken + 1, self.ahead + 1, None
            rest = self._graphs.chain(replace(rows, positions=rows.positions + there), np.maximum(wanted - there, 0))
            return DraftedTokens([ahead.tokens.tokens, *rest], self.ops, ahead.tokens.begun)
        taken = self._take_followed(first)
        if taken is None:
            super()._launch(first)
            latest = self._last_tokens.index_select(0, self.ops.to_device(first.rows))
        else:
            latest = taken.tokens
        choose = None if self._sampler.greedy(first.rows) else self._chooser(decodes)
        return DraftedTokens([latest, *self._graphs.chain(rows, wanted, choose)], self.ops, begun)

    def _chooser(self, decodes: Step) -> Callable[[int, DecodeResult], Tensor]:
        """Returns a function that samples a given number of positions after these decodes, from their logits."""
        at = Positions.of(decodes)

        def choose(place: int, result: DecodeResult) -> Tensor:
            there = replace(at, positions=at.positions + place)
            tokens = self._sampler.sample(result.logits, decodes, there, result.greedy, result.drawn).tokens
            return tokens.clone() if tokens is result.drawn else tokens

        return choose

    @torch.inference_mode()
    def follow(self, step: Step, rows: DecodeRows, tokens: Tensor, computed: Tensor) -> None:
        if self._shifted is None or not self._follows or self._graphs is None or len(tokens) > self._graphs.largest:
            return
        nowhere = np.full(len(tokens), self._pool.scratch_slots()[0])
        late = self._graphs.columns[: len(tokens)], tokens
        try:
            result = self._graphs.run(replace(rows, left=nowhere), late=late)
            followed = FollowUp(step.rows, step.starts, step.counts, result)
            self._ahead = self._draft_ahead(step, tokens, computed, followed)
        except Exception:  # the check itself is on its way
            logger.exception("the head failed behind a check; it computes nothing there any more")
            self._follows = False
            return
        self._followed = followed if self._ahead is None else None  # a draft may overwrite its result

    def forget(self) -> None:
        self._followed = self._ahead = None
        self._room_now, self._room = self._room, None

    def _draft_ahead(self, check: Step, sampled: Tensor, computed: Tensor, followed: FollowUp) -> DraftAhead | None:
        """Begins the draft after this check; None: it must wait until the host knows the check's result."""
        room, graphs, shifted = self._room_now, self._graphs, self._shifted
        if room is None or not np.array_equal(room.rows, check.rows) or not self._sampler.greedy(check.rows):
            return None
        assert graphs is not None and shifted is not None and followed.result.hidden is not None
        rows, wanted = room.begin(check)
        longest = int(check.counts.max()) - 1
        if not wanted.any() or not graphs.chains(rows, longest + room.steps):
            return None
        begun = self.ops.moment()
        right = accepted(check, computed, sampled, self.ops)
        slots = shifted.slots(rows.positions, room.pages, 1 + longest, wanted)
        ends, *left = self.ops.to_device(np.concatenate(((np.cumsum(check.counts) - check.counts)[None], slots)))
        ends = ends + right
        shifted.leave(followed.result.hidden.index_select(0, ends), torch.stack(left).gather(0, right[None])[0])
        latest = followed.result.greedy.index_select(0, ends)
        self._keep(SampledTokens(latest), self.ops.to_device(check.rows))
        made = graphs.chain(rows, wanted, late=LateStart(right, longest, room.steps))
        return DraftAhead(room, check.starts, check.counts, DraftedTokens([latest, *made], self.ops, begun))

    def _launch(self, step: Step) -> LaunchedStep | DeferredStep:
        tokens = self._take_followed(step)
        if tokens is None:
            return super()._launch(step)
        return LaunchedStep(step, Positions.of(step), tokens, {}, self._copied, self.ops)

    def _take_followed(self, step: Step) -> SampledTokens | None:
        """The tokens and results of a step, if it was computed behind the last check; else None."""
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


# The results that a head has computed behind a check, before the host knew how much of the draft was right.
#
# A check of a draft leaves the model's features of all its positions, and the tokens sampled there. So the head can
# compute all these positions at once, while the host waits for the check's result and plans. The next draft then begins with
# the head's result for the last accepted position. What the head has written for later positions is overwritten before it is
# read.
@dataclass(frozen=True, slots=True)
class FollowUp:
    """The computed positions of P requests.

    Attributes:
        rows: int64 [P]: rows of the page table.
        starts: int64 [P]: the positions of their tokens, as the scheduler counts a head's: ``starts + 1`` and up.
        counts: int64 [P]: how many.
        result: The head's results for all of them, in order; valid until the head's next step.
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    result: DecodeResult

    def ends(self, step: Step) -> IntArray | None:
        """int64: where in ``result`` each part of a head's step ends, before the shift. None: some of it was not computed, or a
        request is new to the head. Vectorised."""
        order = np.argsort(self.rows)
        at = order[np.minimum(np.searchsorted(self.rows, step.rows, sorter=order), len(order) - 1)]
        last = step.starts + step.counts - 1
        first, found = self.starts[at], self.rows[at] == step.rows
        found &= (first < step.starts) & (last <= first + self.counts[at]) & (step.samples > 0)
        if step.entries or not found.all():
            return None
        ends: IntArray = (np.cumsum(self.counts) - self.counts)[at] + last - first - 1
        return ends


# A head's next draft, begun behind a check before the host knows how much of the draft before was right.
#
# Where a draft begins depends on how many tokens the check accepts. The device finds that out by itself: it takes the
# positions, slots and keys of the draft from those that were prepared for every number of tokens. So it drafts while
# the host takes the check's result, plans, and launches the next check. A draft for a request that has ended is thrown away.
@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Where the next draft of P requests may lie, while their present draft is checked.

    Attributes:
        rows: int64 [P]: rows of the page table.
        pages: int32 [P, W]: their pages.
        reach: int64 [P]: tokens that these pages hold.
        steps: The number of decodes of their draft, and of the next one.
    """

    rows: IntArray
    pages: npt.NDArray[np.int32]
    reach: IntArray
    steps: int

    def begin(self, check: Step) -> tuple[DecodeRows, IntArray]:
        """A head's first decodes after a check that accepts nothing, and for each request the number of positions from there on
        that have room for a decode."""
        positions = check.starts + 1
        tokens = np.full(len(positions), -1)
        rows = DecodeRows(tokens, positions, self.rows, self.pages, None, None, left=positions)
        # A decode leaves its result one slot further.
        return rows, np.clip(self.reach - 1 - positions, 0, check.counts - 1 + self.steps)


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """A draft that was begun behind a check.

    Attributes:
        room: Where.
        starts, counts: int64 [P]: the check's.
        tokens: The draft, each request's first token and those of ``room.steps`` decodes.
    """

    room: DraftRoom
    starts: IntArray
    counts: IntArray
    tokens: DraftedTokens

    def decodes(self, first: Step, wanted: IntArray) -> int | None:
        """How many decodes of a chain (:meth:`DraftingRunner.launch_chain`) this draft holds; None: it is of another chain, or
        ended early."""
        room, ends = self.room, first.starts + first.counts
        if first.entries or not np.array_equal(first.rows, room.rows):
            return None
        # The computed tokens are those after ``starts``, at most ``counts`` for each request.
        if (first.starts <= self.starts).any() or (ends > self.starts + 1 + self.counts).any():
            return None
        there = np.minimum(room.steps, room.reach - ends)
        if (wanted <= there).all():
            return int(wanted.max())
        return room.steps if (there == room.steps).all() else None


def accepted(check: Step, computed: Tensor, sampled: Tensor, ops: DeviceOps) -> Tensor:
    """int64 [P]: how many tokens of each request's draft a check has accepted; the host does not wait for it.

    Args:
        check: P requests' drafts, each with the token before it.
        computed: int64 [T]: the tokens that it computes.
        sampled: int64 [T]: the token that it has sampled after each.
        ops: The operations of their device.
    """
    counts = check.counts
    firsts, places = np.cumsum(counts) - counts, np.arange(max(1, int(counts.max()) - 1))
    at = firsts[:, None] + np.minimum(places, np.maximum(counts - 2, 0)[:, None])
    after = np.minimum(at + 1, len(check.token_ids) - 1)
    at, after, drafted = ops.to_device(np.stack((at, after, (places < counts[:, None] - 1).astype(np.int64))))
    return (sampled[at] == computed[after]).long().mul(drafted).cumprod(1).sum(1)


# Steps of dummy requests that make drafts and check them. They compile and load all kernels of a draft. Otherwise the first
# real draft would do so, and the scheduler, which measures the cost of drafts, would take drafts for expensive.


_REACH = 16
"""Tokens that the requests' pages hold."""
_DRAWS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))
_PENALISED = SamplingParams(temperature=1.0, presence_penalty=0.5)
"""Its tokens are drawn outside of graphs."""
_CHECKED = ((1, 4), (2, 8))
"""Requests and positions of each: kernels are made for numbers that 16 divides and for others."""


def try_checks(runner: ModelRunner) -> int:
    """Checks drafts, in the pool's first pages; greedy, drawn, and with penalties.

    Args:
        runner: Runs the model.

    Returns:
        Steps that were run; 0 if the pool has too few pages.
    """
    steps = 0
    for sampling in (*_DRAWS, _PENALISED):
        for rows, count in _CHECKED:
            for at, step in enumerate(_steps(runner, rows, [(0, 1), (1, count)], sampling)):
                if at:
                    step.samples = step.counts
                runner.execute(step)
                steps += 1
    return steps


def drafted_before(runner: ModelRunner, first: int) -> ModelRunner:
    """The runner, whose draft has drafted (:func:`try_drafts`) where kernels are compiled or loaded at their first use."""
    if isinstance(runner.draft, DraftingRunner) and runner.draft.asynchronous:
        try_drafts(runner, runner.draft, first)
    return runner


def try_drafts(runner: ModelRunner, draft: DraftingRunner, first: int) -> int:
    """Drafts in the pool's first pages, with sampling and greedily; if the draft model has chains, these are checked and
    continued.

    Args:
        runner: Runs the model.
        draft: Runs the draft model or head.
        first: The first position that it computes.

    Returns:
        Chains and steps that were run; 0 if the pool has too few pages.
    """
    steps = 0
    for sampling in _DRAWS:
        for rows, _ in _CHECKED:
            parts = [(first, 2), *((first + 2 + place, 1) for place in range(3))]
            made = _steps(draft, rows, parts, sampling)
            if not made:
                continue
            reach = np.full(rows, _REACH)
            late = draft.launch_chain(made[0], np.full(rows, 3), reach)
            if late is None:
                for step in made[1:]:
                    step.token_ids = np.full(rows, -1, np.int64)
                for step in made:
                    draft.execute(step)
                steps += len(made)
                continue
            (check,) = _steps(runner, rows, [(first + 1, 5)], sampling)
            stand_ins = LATE - np.arange(4) * rows - np.arange(rows)[:, None]
            check.samples, check.late = check.counts, late
            check.token_ids = np.concatenate((np.zeros((rows, 1), np.int64), stand_ins), 1).ravel()
            runner.execute(check)
            again = draft.launch_chain(made[1], np.full(rows, 3), reach)
            assert again is not None
            again.wait()
            steps += 3
    return steps


def _steps(runner: ModelRunner, rows: int, parts: Sequence[tuple[int, int]], sampling: SamplingParams) -> list[Step]:
    """Makes steps of the first rows of the page table, which share pages; a part gives the first position and the tokens of every
    row."""
    info = runner.info
    pages = -(-_REACH // info.page_size)
    room = min([info.num_pages, *(window.num_pages for window in info.windows)])
    if rows > info.max_running or pages > room or info.context_length < _REACH:
        return []
    slots, ones = np.arange(rows), np.ones(rows, np.int64)
    steps = []
    for at, (start, count) in enumerate(parts):
        step = Step(0, slots, ones * start, ones * count, ones, np.zeros(rows * count, np.int64))
        step.pages = np.tile(np.arange(pages, dtype=np.int32), (rows, 1 + len(info.windows)))
        step.entries = () if at else tuple(Entry(row, 0, sampling, 1) for row in range(rows))
        steps.append(step)
    return steps
