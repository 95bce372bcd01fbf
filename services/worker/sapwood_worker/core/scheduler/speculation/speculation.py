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
_DRAFTED_STEPS, _PLAIN_STEPS = 192, 3
"""After so many steps with drafts in a row, so many without are measured again."""


class Speculation:
    """Plans the drafts of a scheduler's steps.

    Args:
        drafter: Makes them.
        most_positions: Most sampled positions of a step.
        costs: What steps cost; None: whatever is likely enough is drafted.
        room: Gives a request pages for so many tokens after its next one; returns for how many it has some.
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
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def plan(self, decodes: Sequence[Request]) -> list[list[int]]:
        """The draft of each of these requests, which decode; empty if none has any. O(requests), and O(tokens drafted)."""
        rows = len(decodes)
        room = self._most_positions - rows
        if rows == 0 or room < 1 or not self._may_pay(rows):
            return []
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
        return self._cut(decodes, drafts, count, least) if count else []

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
        before, self._ended = self._ended, now
        if before is not None and not step.chunks:
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

    def _draft(self, request: Request, most: int) -> tuple[list[int], float]:
        """What a request may draft, and its rate."""
        if not request.sampling.speculate or request.sampling.logit_processors:  # these see one position at a time
            return [], 0.0
        drafts = request.drafts
        if drafts is None:
            drafts = request.drafts = RequestDrafts(self._drafter.begin(request))
        elif drafts.rate < _HOPELESS and (len(request.token_ids) + request.serial) % _SELDOM:
            return [], 0.0
        rate, unknown = drafts.learn(), request.unknown
        most = min(most, request.max_length - len(request.token_ids) - unknown - 1)
        draft = drafts.drafter.propose(unknown, most if rate >= _LEAST_RATE else 0)
        worth = rate**unknown
        for count, token in enumerate(draft):
            worth *= rate
            if worth < _LEAST_WORTH or token in request.stops:  # nothing follows a stop token
                draft = draft[:count]
                break
        if draft and request.grammar is not None:
            draft = draft[: request.grammar.validate(draft)]
        return draft, rate

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
