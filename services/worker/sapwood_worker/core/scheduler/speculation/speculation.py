"""How many tokens to draft for each request of a step.

Verification is exact (``model/sampling/positions.py``), so all this decides is what a step costs and brings. Each request has a
rate: how often its drafter's next token was right of late. It is learned by looking on, whether anything is drafted or not, so
that a request whose text cannot be foreseen costs comparisons on the host and nothing on the device. A drafted token is used if
all before it are right: the j-th is worth ``rate ** j`` tokens. A step takes the drafted tokens of all its requests that are
worth most, as many as bring the most tokens a second by the measured cost of steps, and none if that is not clearly more than
without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.request_drafts import RequestDrafts
from sapwood_worker.core.scheduler.running.step_in_flight import StepInFlight
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.core.scheduler.speculation.step_costs import LADDER, StepCosts
from sapwood_worker.core.scheduler.speculation.trials import Trials
from sapwood_worker.core.scheduler.waiting.fairness import TenantFairness
from sapwood_worker.records.step import ModelOutput

FEWEST_POSITIONS = 32
"""Sampled positions that a step may have though fewer requests may run; else it has at most as many as these, for which there
are decode graphs and memory."""
MOST_DRAFTED = 31
"""Tokens of a draft: with the token before them they fill a decode graph of 32 rows."""
_LEAST_RATE, _LEAST_WORTH = 0.3, 0.2
"""Rate below which nothing is drafted, and worth below which a drafted token is not looked at."""
_HOPELESS, _SELDOM = 0.05, 8
"""Rate below which a request is looked at only once in so many tokens, to save the host's time."""
_CLEARLY = 1.08
"""Times as many tokens a second that drafting must promise: measurements are noisy."""
_TRIED = 3
"""Tokens of a draft that is made to see whether drafts are right."""
_MUCH = 64
"""Tokens of requests' past that a drafter may compute in a step whose time counts."""
_DRAFTED_STEPS, _PLAIN_STEPS = 192, 3
"""After so many steps with drafts in a row, so many without are measured again."""


class Speculation:
    """Plans the drafts of a scheduler's steps.

    Args:
        drafter: Makes them.
        most_positions: Most sampled positions of a step.
        costs: What steps cost; None: whatever is likely enough is drafted.
        room: Gives a request pages for so many tokens after its next one; returns for how many it has some.

    Attributes:
        waits: Whether the last plan would have drafted, but for tokens that are not known yet.
        drafter_name: The drafter's name.
        drafts: Drafts that were checked.
        drafted_tokens: Tokens of these.
        accepted_tokens: Of these, tokens that became output.
    """

    def __init__(
        self, drafter: Drafter, most_positions: int, costs: StepCosts | None, room: Callable[[Request, int], int]
    ) -> None:
        self._drafter = drafter
        self._most_positions = most_positions
        self._costs = costs
        self._room = room
        self._resting = 0
        self._ended: float | None = None
        self._trials = Trials()
        self.waits = False
        self.drafter_name = drafter.name
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def plan(self, decodes: Sequence[Request]) -> list[list[int]]:
        """The draft of each of these requests, which decode; empty if none has any. O(requests), and O(tokens drafted)."""
        self.waits = False
        rows = len(decodes)
        room = self._most_positions - rows
        if rows == 0 or room < 1 or not self._may_pay(rows):
            return []
        if self._drafter.computes and self._trials.due():
            return self._try(decodes[self._trials.turn % rows], decodes)
        drafts: list[list[int]] = []
        worths: list[float] = []
        for request in decodes:
            draft, rate = self._draft(request, min(room, MOST_DRAFTED))
            drafts.append(draft)
            worth = rate**request.unknown
            for _ in draft:
                worth *= rate
                worths.append(worth)
        if not worths:
            return []
        worths.sort(reverse=True)
        count, least = self._best(rows, worths[:room])
        if not count:
            return []
        if self._drafter.computes and any(request.unknown for request in decodes):
            self.waits = True
            return []
        return self._fill(decodes, self._cut(decodes, drafts, count, least))

    def took(self, step: StepInFlight, output: ModelOutput, now: float, fairness: TenantFairness) -> None:
        """Notes how far each draft of a step was right, so much more than a token is computed of its request, and what it cost.

        Args:
            step: The step.
            output: What came of it.
            now: Seconds on the scheduler's clock.
            fairness: Is told of the tokens that came of drafts.
        """
        for request, draft, tokens in zip(step.decodes, step.drafts, output.token_ids, strict=False):
            if draft:
                right = len(tokens) - 1
                request.computed += right
                request.planned += right
                fairness.charge(request.tenant, right)
                self._count(request, len(draft), 0 if request.over else right)
        if step.chunks:
            self.waits = False
        before, self._ended = self._ended, now
        if before is not None and not step.chunks and not (step.drafts and self._drafter.caught_up > _MUCH):
            self.measured(len(step.decodes), len(step.plan.token_ids), now - before)

    def measured(self, rows: int, positions: int, seconds: float) -> None:
        """Notes how long a step of so many requests and sampled positions took that computed no prompt."""
        if self._costs is not None and rows:
            self._costs.note(rows, positions, seconds)

    def halted(self) -> None:
        """Nothing is scheduled for a while: that is no part of the next step's time."""
        self._ended = None

    def _count(self, request: Request, drafted: int, accepted: int) -> None:
        assert request.drafts is not None
        request.drafts.drafted += drafted
        request.drafts.accepted += accepted
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.drafts += 1
        if self._drafter.computes:
            self._trials.drafted(accepted, wrong=accepted < drafted)

    def _try(self, request: Request, decodes: Sequence[Request]) -> list[list[int]]:
        """A short draft for one request, whatever its rate: nobody would know if drafts were right again."""
        if any(each.unknown for each in decodes):
            self.waits = True
            return []
        self._trials.began()
        draft, _ = self._draft(request, _TRIED, least=0.0)
        count = self._room(request, len(draft)) if draft else 0
        return self._fill(decodes, [draft[:count] if each is request else [] for each in decodes]) if count else []

    def _fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts with all their tokens; empty if there are none."""
        if drafts and self._drafter.computes:
            drafts = self._drafter.fill(decodes, drafts)
            drafts = [self._usable(request, draft) for request, draft in zip(decodes, drafts, strict=True)]
        return drafts if any(drafts) else []

    def _may_pay(self, rows: int) -> bool:
        """Whether drafts would pay if all of them were right."""
        costs = self._costs
        if costs is None:
            return True
        if self._resting:
            self._resting -= 1
            return False
        plain = costs.plain(rows)
        if plain is None:
            return False
        if costs.stale(rows, _DRAFTED_STEPS):
            self._resting = _PLAIN_STEPS - 1
            return False
        most = min(self._most_positions, rows * (1 + MOST_DRAFTED))
        return any(rung * plain > _CLEARLY * rows * costs.drafted(rows, rung) for rung in LADDER if rows < rung <= most)

    def _draft(self, request: Request, most: int, least: float = _LEAST_RATE) -> tuple[list[int], float]:
        """What a request may draft, and its rate; nothing if that is below ``least``."""
        if not request.sampling.speculate or request.sampling.logit_processors:  # these see one position at a time
            return [], 0.0
        drafts = request.drafts
        computes = self._drafter.computes
        if drafts is None:
            drafts = request.drafts = RequestDrafts(
                self._drafter.begin(request), self._trials.rate if computes else 0.0
            )
        elif not computes and drafts.rate < _HOPELESS and (len(request.token_ids) + request.serial) % _SELDOM:
            return [], 0.0
        rate, unknown = drafts.learn(), request.unknown
        most = min(most, request.max_length - len(request.token_ids) - unknown - 1)
        draft = drafts.drafter.propose(unknown, most if rate >= least else 0)
        if least:
            worth = rate**unknown
            for count in range(len(draft)):
                worth *= rate
                if worth < _LEAST_WORTH:
                    draft = draft[:count]
                    break
        return draft if computes else self._usable(request, draft), rate

    def _usable(self, request: Request, draft: list[int]) -> list[int]:
        """A draft up to what ends the request, after which nothing follows, or what its grammar forbids."""
        for count, token in enumerate(draft):
            if token in request.stops:
                draft = draft[:count]
                break
        return draft[: request.grammar.validate(draft)] if draft and request.grammar is not None else draft

    def _best(self, rows: int, worths: Sequence[float]) -> tuple[int, float]:
        """How many drafted tokens to take, and how much the last of them is worth. ``worths`` are sorted, the most first."""
        costs = self._costs
        if costs is None:
            return len(worths), worths[-1]
        plain = costs.plain(rows)
        assert plain is not None
        best, taken, brought, at = _CLEARLY * rows / plain, 0, float(rows), 0
        for rung in LADDER:
            if rung <= rows:
                continue
            end = min(rung - rows, len(worths))
            brought += sum(worths[at:end])
            at = end
            if (rate := brought / costs.drafted(rows, rows + end)) > best:
                best, taken = rate, end
            if end == len(worths):
                break
        return taken, worths[taken - 1] if taken else 0.0

    def _cut(self, decodes: Sequence[Request], drafts: list[list[int]], count: int, least: float) -> list[list[int]]:
        """The drafts, cut to so many tokens in all, none of which is worth less than ``least``, and to the pages there are."""
        left = count
        for index, (request, draft) in enumerate(zip(decodes, drafts, strict=True)):
            if not draft:
                continue
            assert request.drafts is not None
            rate = request.drafts.rate
            worth, length = rate**request.unknown, 0
            for _ in draft[:left]:
                worth *= rate
                if worth < least:
                    break
                length += 1
            length = self._room(request, length) if length else 0
            drafts[index] = draft[:length]
            left -= length
        return drafts if left < count else []
