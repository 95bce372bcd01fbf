"""Drafts by a model: a small draft model guesses what the large one will generate.

The draft model runs steps of its own: first the tokens of requests that it has not computed yet (one or two, or a prompt), then
token after token. It samples with the request's own seed. A sample is a function of logits, seed and position; so at any
temperature the draft model samples the model's tokens, as far as their logits agree. The draft model ignores penalties, bans and
grammars: the check of the draft applies them.

The draft model computes nothing for a request until it drafts for it. Its keys and values lie under the page ids of the ledger,
so they are shared, retracted, resumed and evicted with the model's pages.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from sapwood_worker.core.cache.pages import PageAllocator, PageTable
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.step import LATE, Entry, IntArray, LateTokens, LaunchedStep, Runner, Step

logger = logging.getLogger(__name__)


# Which pages also hold a draft model's keys and values.
#
# A draft model has a pool of its own with the same number of pages as the model's pool, under the same page ids. So a request's
# row of the page table serves both, and both share prefixes. But the draft model computes only requests for which it drafts.
# So each page's epoch is noted when the draft model fills it: a page that is allocated again has another epoch, and counts as
# empty.


class DraftPages:
    """The filled pages.

    Args:
        table: The page table.
        ledger: Whose pages stand in it.
        page_size: Tokens in a page.
    """

    def __init__(self, table: PageTable, ledger: PageAllocator, page_size: int) -> None:
        self.page_size = page_size
        self.table = table
        self._ledger = ledger
        self._filled = np.zeros(ledger.num_pages, np.int64)  # epochs begin at 1

    def leading(self, slot: int, tokens: int) -> int:
        """How many of a row's first tokens, in whole pages, the draft model has computed. Vectorised, O(pages)."""
        pages = self.table.pages(slot)[: tokens // self.page_size]
        missing = self._filled[pages] != self._ledger.handle(pages).epochs
        return int(missing.argmax() if missing.any() else len(pages)) * self.page_size

    def fill(self, slot: int, start: int, end: int) -> None:
        """Notes that the draft model has now computed the tokens of a row from ``start`` to ``end``; earlier ones it had computed
        before."""
        first, last = start // self.page_size, end // self.page_size
        if first == last:  # as for most drafts
            return
        pages = self.table.pages(slot)[first:last]
        self._filled[pages] = self._ledger.handle(pages).epochs

    def mark(self, slot: int, position: int) -> tuple[int, int]:
        """The page of a position, and the page's epoch. A later mark is equal only if the page still has the same content. -1
        beyond the row's end."""
        if position // self.page_size >= self.table.length(slot):
            return -1, -1
        page = int(self.table.rows[slot, position // self.page_size])
        return page, self._ledger.epoch_of(page)

    def reach(self, slot: int) -> int:
        """Tokens that a row's pages hold."""
        return self.table.length(slot) * self.page_size

    def rows(self, slots: IntArray, end: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """The pages of some rows, int32 [R, W], up to the page of the token before ``end``; entries beyond a row's last page are
        undefined."""
        return self.table.rows[slots, : -(-end // self.page_size)]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts.

    Attributes:
        runner: Runs it, over a pool with a page for each of the model's.
        context_length: Most tokens that it takes.
        max_step_tokens: The most tokens of one draft step; at least the number of requests that may run.
        name: What it is, as metrics call it.
        first: The first position that it computes: a head has no features before position 1.
    """

    runner: Runner
    context_length: int
    max_step_tokens: int
    name: str = "draft"
    first: int = 0


@runtime_checkable
class ChainRunner(Protocol):
    """A runner that may run several decodes after one call."""

    def launch_chain(self, first: Step, wanted: IntArray, reach: IntArray) -> LateTokens | None:
        """Begins a step and then decodes in sequence; each decode takes the tokens of the one before.

        Args:
            first: The step, which samples a token of each of P requests; their pages reach to the token of the last decode.
            wanted: int64 [P]: in how many decodes each request takes part; at least one request takes part in one.
            reach: int64 [P]: tokens that the requests' pages hold, which bounds how far the next draft may continue.

        Returns:
            At least (1 + most wanted) * P tokens, those of the first step first; undefined for a request that has ended. None:
            nothing was begun.
        """
        ...


class ModelRow:
    """Implements :class:`~sapwood_worker.core.scheduler.request.RowDrafter`.

    Attributes:
        computed: Tokens that the draft model has computed, if ``mark`` is still the mark of the last token's page.
        filled: How many of these the pages are known to hold.
        mark: The mark of the page where ``computed`` ends; None: nothing is computed.

    Args:
        tokens: The request's; grows.
        longest: Most tokens that the draft model takes.
    """

    def __init__(self, tokens: array[int], longest: int) -> None:
        self._tokens = tokens
        self._longest = longest
        self._draft: list[int] = []
        self._at = 0
        self.computed = self.filled = 0
        self.mark: tuple[int, int] | None = None

    def follow(self) -> tuple[int, int]:
        draft, self._draft = self._draft, []
        came = self._tokens[self._at : self._at + len(draft)]
        right = 0
        while right < len(came) and came[right] == draft[right]:
            right += 1
        self.computed += min(
            right, max(0, len(draft) - 1)
        )  # the draft model has guessed the last token, but not computed it
        return right, int(right < len(came))

    def propose(self, unknown: int, most: int) -> list[int]:
        return [-1] * max(0, min(most, self._longest - len(self._tokens) - unknown))

    def drafted(self, draft: list[int]) -> None:
        """Takes the draft of what follows the tokens known now. The draft model has computed all of these tokens."""
        self._draft, self._at = draft, len(self._tokens)
        self.computed = self.filled = self._at


@dataclass(slots=True)
class _Part:
    """A request in one draft: ``start`` of its tokens are computed, ``wanted`` more are to be guessed."""

    index: int
    request: Request
    row: ModelRow
    start: int
    wanted: int
    draft: list[int]


class ModelDrafter:
    """Implements :class:`~sapwood_worker.core.scheduler.speculation.drafter.Drafter`.

    A draft model that fails drafts nothing any more; the model continues without drafts.

    Attributes:
        chained: How many steps were run without being launched one by one.

    Args:
        model: The draft model.
        pages: What it has computed.
    """

    computes = True

    def __init__(self, model: DraftModel, pages: DraftPages) -> None:
        self.name = model.name
        self.caught_up = self.chained = 0
        self.late: LateTokens | None = None
        self._late_parts: list[_Part] = []
        self._model = model
        self._chains = model.runner if isinstance(model.runner, ChainRunner) else None
        self._pages = pages
        self._rows: dict[
            int, int
        ] = {}  # row of the page table -> serial of the request that the draft model knows there
        self._steps = 0
        self._broken = False

    def begin(self, request: Request) -> ModelRow:
        return ModelRow(request.token_ids, self._model.context_length)

    def behind(self, request: Request) -> int:
        assert request.drafts is not None
        row = request.drafts.drafter
        assert isinstance(row, ModelRow)
        own = row.mark is not None and self._pages.mark(request.slot, row.filled) == row.mark
        return len(request.token_ids) - (row.computed if own else 0)

    def fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        parts = [self._part(at, decodes[at], len(draft)) for at, draft in enumerate(drafts) if draft]
        filled: list[list[int]] = [[] for _ in drafts]
        self.late = None
        if self._broken or not parts:
            return filled
        try:
            self._guess(parts, self._catch_up(parts))
            if self.late is not None and any(part.request.grammar is not None for part in parts):
                self.settle()  # masks are made of the tokens
        except Exception:
            logger.exception("the draft model failed; nothing is drafted any more")
            self._broken = True
            return filled
        for part in parts:
            slot, known = part.request.slot, len(part.request.token_ids)
            filled[part.index] = part.draft
            part.row.drafted(part.draft)
            self._pages.fill(slot, part.start if part.start > self._model.first else 0, known)
            part.row.mark = self._pages.mark(slot, known)
        return filled

    def _part(self, index: int, request: Request, wanted: int) -> _Part:
        assert request.drafts is not None and request.unknown == 0
        row, slot, known = request.drafts.drafter, request.slot, len(request.token_ids)
        assert isinstance(row, ModelRow)
        own = row.mark is not None and self._pages.mark(slot, row.filled) == row.mark
        if own:  # what was drafted and has become output
            self._pages.fill(slot, row.filled, row.computed)
        start = self._pages.leading(slot, known - 1)
        if own and start == row.computed // self._pages.page_size * self._pages.page_size:
            start = min(row.computed, known - 1)
        return _Part(index, request, row, max(start, self._model.first), wanted, [])

    def _catch_up(self, parts: Sequence[_Part]) -> list[int]:
        """Computes the requests' known tokens that do not fit in one step; returns the position at which each request
        continues."""
        most = self._model.max_step_tokens
        self.caught_up = sum(len(part.request.token_ids) - part.start for part in parts) - len(parts)
        starts = [part.start for part in parts]
        while sum(len(part.request.token_ids) for part in parts) - sum(starts) > most:
            chunk: list[tuple[_Part, int, int]] = []
            left = most
            for at, part in enumerate(parts):
                count = min(left, len(part.request.token_ids) - 1 - starts[at])
                if count > 0:
                    chunk.append((part, starts[at], count))
                    starts[at] += count
                    left -= count
            self._launch(chunk, samples=False).result()
        return starts

    def settle(self) -> float:
        late, self.late = self.late, None
        if late is None:
            return 0.0
        tokens, count = late.wait(), len(self._late_parts)
        for at, part in enumerate(self._late_parts):
            part.draft[:] = tokens[at::count][: part.wanted].tolist()
        return late.seconds()

    def _guess(self, parts: list[_Part], starts: Sequence[int]) -> None:
        """Computes the known tokens from ``starts`` on and guesses token after token; each step is launched while the one before
        is computed."""
        ends = [len(part.request.token_ids) for part in parts]
        first = [(part, start, end - start) for part, start, end in zip(parts, starts, ends, strict=True)]
        # The draft after this one may begin before the host asks for it, at the last position where this one can end.
        end = max(len(part.request.token_ids) + 2 * part.wanted + 2 for part in parts)
        step = self._step(first, samples=True, end=end)
        if self._chain(parts, step):
            return
        launched = deque([(parts, self._model.runner.launch(step))])
        for place in range(1, max(part.wanted for part in parts)):
            running = [part for part in parts if part.wanted > place]
            chunk = [(part, len(part.request.token_ids) + place - 1, 1) for part in running]
            launched.append((running, self._launch(chunk, samples=True)))
            self._take(*launched.popleft())
        self._take(*launched.popleft())
        for part in parts:
            if -1 in part.draft:  # its logits were no numbers
                del part.draft[part.draft.index(-1) :]

    def _chain(self, parts: list[_Part], step: Step) -> bool:
        """Drafts several tokens with one call, if the runner can run the draft steps one after another; the tokens are late
        then."""
        wanted = np.array([part.wanted - 1 for part in parts])
        if self._chains is None or not wanted.any():
            return False
        reach = np.array([self._pages.reach(part.request.slot) for part in parts])
        self.late = self._chains.launch_chain(step, wanted, reach)
        if self.late is None:
            return False
        self.chained += int(wanted.max())
        self._late_parts = parts
        for at, part in enumerate(parts):
            part.draft += [LATE - at - place * len(parts) for place in range(part.wanted)]
        return True

    @staticmethod
    def _take(parts: list[_Part], launched: LaunchedStep) -> None:
        for part, tokens in zip(parts, launched.result().token_ids, strict=True):
            part.draft += tokens

    def _launch(self, chunk: Sequence[tuple[_Part, int, int]], *, samples: bool) -> LaunchedStep:
        """Launches a step with some tokens of each part, from a position on."""
        return self._model.runner.launch(self._step(chunk, samples=samples))

    def _step(self, chunk: Sequence[tuple[_Part, int, int]], *, samples: bool, end: int = 0) -> Step:
        """Makes a step, with the pages up to that of the token before ``end``, if the step itself ends earlier."""
        rows = np.array([part.request.slot for part, _, _ in chunk], np.int64)
        starts = np.array([start for _, start, _ in chunk], np.int64)
        counts = np.array([count for _, _, count in chunk], np.int64)
        tokens = [_tokens(part.request.token_ids, start, count) for part, start, count in chunk]
        step = Step(
            self._steps, rows, starts, counts, np.full(len(rows), int(samples), np.int64), np.concatenate(tokens)
        )
        step.pages = self._pages.rows(rows, max(end, int((starts + counts).max())))
        step.entries = tuple(self._entries(chunk))
        self._steps += 1
        return step

    def _entries(self, chunk: Sequence[tuple[_Part, int, int]]) -> list[Entry]:
        """Entries of the requests that the draft model does not know yet."""
        found = []
        for part, _, _ in chunk:
            request = part.request
            if self._rows.get(request.slot) != request.serial:
                self._rows[request.slot] = request.serial
                found.append(Entry(request.slot, request.serial, request.sampling.draws(), request.output_start))
        return found


def _tokens(known: array[int], start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A request's tokens from a position on; -1 for the one that the draft model has guessed itself."""
    if start >= len(known):
        return np.full(count, -1, np.int64)
    return np.frombuffer(known, np.uint32, count, start * known.itemsize).astype(np.int64)
