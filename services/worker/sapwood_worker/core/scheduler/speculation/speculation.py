"""How many tokens to draft for each request of a step.

Verification is exact (``model/sampling/positions.py``), so this module only decides what a step costs and how many tokens it
yields. Each request has a
rate: how often its drafter's next token was right of late. The rate is learned by comparing guesses with the output, even if
nothing is drafted. So a request with unpredictable text costs comparisons on the host and nothing on the device. A drafted token
is used if
all before it are right: the j-th is worth ``rate ** j`` tokens. :class:`Planner` chooses the tokens of a step by the cost of
steps; without a planner a step takes the likely ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sapwood_worker.core.scheduler.batch import StepInFlight
from sapwood_worker.core.scheduler.request import Request, RequestDrafts, learned
from sapwood_worker.core.scheduler.results import may_draft
from sapwood_worker.core.scheduler.speculation.costs import DraftCosts, StepCosts
from sapwood_worker.core.scheduler.speculation.drafter import Drafter
from sapwood_worker.records.step import LateTokens, ModelOutput

# How many drafted tokens a step takes, so that drafting never loses more than a small share of the time.
# Each row offers its draft with the worth of each token: the chance that it is used.
# A step takes the likeliest draft
# tokens of all rows; their number is the one with the most tokens a second by the measured times of steps. Times that are not
# known are tried from the smallest draft up, as long as they would pay if one more rung of the ladder cost nothing.
# Two accounts bound the loss, in durations of steps without drafts. Each gets a share of the time that passes and the time that
# drafts have gained, up to a bound. It pays for drafts that gained less than they cost, for the slow step after them, and for
# searches without result. Drafts that the accounts cannot pay for are not searched, tried or made. The first account books the
# expected gain of drafts, times the share of expectations that come true: a run of luck neither pays nor costs, so this account
# can be small. The second books accepted tokens, and bounds the loss whatever happens.


SHARE = 0.005
"""The share of the time that drafts may lose."""
_FIRST, _MOST, _LEAST = 6.0, 12.0, 1.0
"""The first account: its initial balance, its largest balance, and the least balance for a search or a trial."""
_FIRST_REAL, _MOST_REAL, _LEAST_REAL = 10.0, 12.0, 3.0
"""The same for the second account."""
_CLEARLY = 1.03
"""The factor of tokens a second that drafting must promise over plain decoding, because measurements are noisy."""
_HOPE, _SPARE = 0.1, 0.75
"""How much better drafts may be than their measured rate, and the part of the first account that may be spent to find out."""
_FORGET, _TRUST = 0.98, 8.0
"""The factor by which each step fades the memory of expected gains, and the fulfilled ones, in tokens, that it starts with."""
_FORGIVE = 0.0005
"""How much a step without drafts restores trust in expected gains."""
_OUTLIER = 2.0
"""A duration above this multiple of the usual one is a disturbance of the machine, not the cost of the draft."""
_MUCH = 64
"""The most earlier tokens of requests that a drafter may compute in a step whose time counts."""
_CATCH_UP = 1 / 64
"""A first guess of the cost of computing an earlier token, in plain steps."""
_DEPTHS = (1, 2, 3, 4, 5, 7, 10, 15, 22, 31)
"""The draft lengths that are compared, if each draft token takes time."""
_LOOK = 0.25
"""The longest time of a search for drafts, in plain steps: new requests, and those not searched for long, take a while."""
_DRAFTED_STEPS, _PLAIN_STEPS = 512, 3
"""After a number of steps with drafts in a row, some steps without drafts are measured again."""


class Planner:
    """Plans drafts and keeps the accounts. It is pure: it sees no clock, no request and no token.

    Args:
        most_positions: Most sampled positions of a step.
        longest: Most tokens of a draft.
        costs: What steps cost, if something is known already.

    Attributes:
        costs: What steps cost.
        credit: The balance of the first account, in steps without drafts.
        real: The balance of the second account.
    """

    def __init__(self, most_positions: int, longest: int, costs: StepCosts | None = None) -> None:
        self.costs = costs or StepCosts()
        self.credit, self.real = _FIRST, _FIRST_REAL
        self._most_positions = most_positions
        self._longest = longest
        self._kept = self._made = _TRUST
        self._promised = 0.0
        self._drafting = False
        self._resting = 0
        self._caught_up = _CATCH_UP
        self._filling = self._usual_filling = 0.0
        self._drafts = DraftCosts()

    def looks(self, rows: int) -> bool:
        """Whether to look for drafts of this many requests: drafting would pay if all tokens were accepted, and the time accounts
        can pay."""
        costs = self.costs
        if self._resting:
            self._resting -= 1
            return False
        plain = costs.plain(rows)
        if plain is None:
            return False
        if costs.stale(rows, _DRAFTED_STEPS):
            self._resting = _PLAIN_STEPS - 1
            return False
        least, least_real = (0.0, 0.0) if self._drafting else (_LEAST, _LEAST_REAL)
        if self.credit < least or self.real < least_real:
            return False
        most, deep = min(self._most_positions, rows * (1 + self._longest)), self._drafts.of(rows, 1) or 0.0
        pays = (rung * plain > _CLEARLY * rows * (seconds + deep) for rung, seconds, _ in costs.curve(rows, most))
        return any(pays)

    def choose(self, rows: int, offers: Sequence[tuple[float, int]], *, computes: bool) -> tuple[int, float, int]:
        """Which tokens to take; :meth:`looks` must have returned true.

        Args:
            rows: Requests.
            offers: For each offered token its chance, and its place in its draft from 1 on; the highest chance first. At least
                one.
            computes: Whether the drafter takes time for each place.

        Returns:
            How many tokens to take, the chance of the last of them, and the most tokens of a draft.
        """
        plain, deep = self.costs.plain(rows), self._drafts.of(rows, 1)
        assert plain is not None
        room = self._most_positions - rows
        curve = self.costs.curve(rows, rows + min(room, len(offers)))
        if not computes:
            return (*self._best(rows, plain, curve, [chance for chance, _ in offers[:room]], 0.0)[:2], self._longest)
        best = (0, 0.0, _CLEARLY * rows / plain)
        depth, longest = 0, max(place for _, place in offers) if deep is not None else 1
        for most in _DEPTHS:
            chances = [chance for chance, place in offers if place <= most][:room]
            found = self._best(rows, plain, curve, chances, self._drafts.of(rows, most) or 0.0)
            if found[2] > best[2]:
                best, depth = found, most
            if most >= longest:
                break
        return (*best[:2], depth)

    def _best(
        self, rows: int, plain: float, curve: Sequence[tuple[int, float, bool]], chances: Sequence[float], extra: float
    ) -> tuple[int, float, float]:
        """How many of these tokens to take if drafting takes ``extra`` seconds, the last one's chance, and the expected tokens a
        second."""
        kept = self._kept / self._made
        best, taken, brought, at = _CLEARLY * rows / plain, 0, float(rows), 0
        tried: list[tuple[float, int]] = []
        for rung, seconds, known in curve:
            end = min(rung - rows, len(chances))
            brought += kept * sum(chances[at:end])
            at = end
            rate = brought / (seconds + extra)
            if not known:
                tried.append((rate, end))
            elif rate > best:
                best, taken = rate, end
            if end == len(chances):
                break
        hope = max((rate for rate, _ in tried), default=0.0)
        if hope > best * _CLEARLY:  # from the smallest draft up: its cost may show that a longer one cannot pay
            best, taken = hope, tried[0][1]
        return taken, chances[taken - 1] if taken else 0.0, best

    def filled(self, rows: int, longest: int, seconds: float, caught_up: int) -> None:
        """Notes how long it took to compute drafts for ``rows`` requests.

        Args:
            rows: The requests.
            longest: Tokens of the longest draft.
            seconds: How long it took.
            caught_up: How many earlier tokens of requests were computed before the drafts.
        """
        self._filling = self._usual_filling = seconds
        usual, plain = self._drafts.of(rows, longest), self.costs.plain(rows)
        if caught_up <= _MUCH:
            if plain is not None:  # the first one may compile
                self._usual_filling = min(seconds, longest * plain if usual is None else _OUTLIER * usual)
            self._drafts.note(rows, longest, seconds)
        elif plain is not None:
            each = max(0.0, seconds - (usual or 0.0)) / plain / caught_up
            self._caught_up += 0.5 * (each - self._caught_up)

    @property
    def hope(self) -> float:
        """How much better than their rates drafts are taken to be: a spare balance is spent on trying them."""
        return _HOPE if self.credit > _SPARE * _MOST and self.real > _LEAST_REAL else 0.0

    def affords(self, tokens: int) -> bool:
        """Whether the time account can pay for computing this many earlier tokens of requests."""
        return tokens <= _MUCH or tokens * self._caught_up <= self.credit

    def drafted(self, promised: float) -> None:
        """The coming step checks drafts; ``promised`` is the number of tokens expected from all of them."""
        self._promised = promised

    def patience(self, rows: int) -> float:
        """Seconds that looking for drafts of this many requests may take; :meth:`looks` must have returned true."""
        plain = self.costs.plain(rows)
        assert plain is not None
        return _LOOK * plain

    def looked(self, rows: int, seconds: float) -> None:
        """Notes that a search for drafts took ``seconds`` and found none."""
        plain = self.costs.plain(rows)
        if plain is not None:
            self._book(-seconds / plain, -seconds / plain)

    def took(self, rows: int, positions: int, accepted: int, seconds: float) -> None:
        """Notes a step that computed no prompt.

        Args:
            rows: Its requests.
            positions: The positions that it sampled.
            accepted: How many of its draft tokens were accepted.
            seconds: From the end of the step before to the end of this step.
        """
        plain, drafting = self.costs.plain(rows), positions > rows
        if drafting:
            self._kept = self._kept * _FORGET + accepted
            self._made = self._made * _FORGET + self._promised
        else:
            self._kept += (self._made - self._kept) * _FORGIVE
        if plain is not None:
            share, lost = SHARE * min(seconds / plain, _OUTLIER), 0.0
            if drafting:
                known = self.costs.known(rows, positions)
                most = self.costs.ceiling(rows, positions) if known is None else _OUTLIER * known
                lost = (min(seconds - self._filling, most) + self._usual_filling) / plain - 1
            elif self._drafting:  # the first step after is not overlapped
                lost = min(max(seconds / plain - 1, 0.0), 1.0)
            expected = self._promised * self._kept / self._made if drafting else 0.0
            self._book(share - lost + expected / rows, share - lost + accepted / rows)
        self.costs.note(rows, positions, seconds - self._filling)
        self._filling = self._usual_filling = 0.0
        self._drafting = drafting

    def _book(self, expected: float, real: float) -> None:
        self.credit = min(self.credit + expected, _MOST)
        self.real = min(self.real + real, _MOST_REAL)


FEWEST_POSITIONS = 32
"""A step may always have this many sampled positions. Above it, a step has at most as many as requests may run, because decode
graphs and memory exist for that number."""
MOST_DRAFTED = 31
"""Tokens of a draft: with the token before them they fill a decode graph of 32 rows."""
_LEAST_RATE, _LEAST_WORTH = 0.3, 0.2
"""If the cost of steps is not measured: the rate below which nothing is drafted, and the least worth of a drafted token."""
_NO_RATE, _NO_WORTH = 0.02, 0.02
"""The same if the cost is measured: below these no step could pay."""
_HOPELESS, _SELDOM = 0.05, 8
"""Acceptance rate below which a draft is looked for only once in several tokens, to save the host's time."""
_HOPED = 0.95
"""Above this rate, drafts are not assumed to be better than their rate."""
_TRIED = 3
"""The length of a trial draft, made to see whether drafts are right."""


class Speculation:
    """Plans the drafts of a scheduler's steps.

    Args:
        drafter: Makes them.
        most_positions: Most sampled positions of a step.
        costs: What steps cost; None: every likely enough token is drafted.
        room: Gives a request pages for a number of tokens after its next one; returns for how many it has pages.
        clock: Seconds; it measures the search for drafts.

    Attributes:
        waits: Whether the last plan would have drafted if all tokens had been known.
        late: The tokens of the last plan's drafts, if only the device knows them; None: the drafts hold them.
        drafter_name: The drafter's name.
        drafts: Drafts that were checked.
        drafted_tokens: Tokens of these.
        accepted_tokens: How many of these became output.
    """

    def __init__(
        self,
        drafter: Drafter,
        most_positions: int,
        costs: StepCosts | None,
        room: Callable[[Request, int], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._most_positions = most_positions
        self._planner = None if costs is None else Planner(most_positions, MOST_DRAFTED, costs)
        self._least = (_LEAST_RATE, _LEAST_WORTH) if costs is None else (_NO_RATE, _NO_WORTH)
        self._room = room
        self._clock = clock
        self._ended: float | None = None
        self._trials = Trials()
        self._turn = 0
        self._late = (0, 0, 0)
        self.waits = False
        self.late: LateTokens | None = None
        self.drafter_name = drafter.name
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def plan(self, decodes: Sequence[Request]) -> list[list[int]]:
        """The draft of each of these decoding requests; empty if no request has one. O(requests + drafted tokens)."""
        self.waits, self.late = False, None
        planner, rows = self._planner, len(decodes)
        if rows == 0 or self._most_positions <= rows or not (planner is None or planner.looks(rows)):
            return []
        began = self._clock()
        drafts = self._plan(decodes)
        if planner is None:
            return drafts
        if drafts:
            planner.drafted(sum(map(self._worth, decodes, drafts)))
        else:
            planner.looked(rows, self._clock() - began)
        return drafts

    def _plan(self, decodes: Sequence[Request]) -> list[list[int]]:
        if self._drafter.computes and self._trials.due() and (tried := self._trials.choose(decodes)) is not None:
            return self._try(tried, decodes)
        behind, most, rows = 0, min(self._most_positions - len(decodes), MOST_DRAFTED), len(decodes)
        drafts: list[list[int]] = [[] for _ in decodes]
        rates = [0.0] * rows
        bounded = None if self._drafter.computes else self._planner
        until = 0.0 if bounded is None else self._clock() + bounded.patience(rows)
        first = self._turn % rows
        for place in (*range(first, rows), *range(first)):
            if (
                bounded is not None and place != first and self._clock() > until
            ):  # the remaining requests come first next time
                self._turn = place
                break
            request = decodes[place]
            draft, rate = self._draft(request, most, *self._least)
            if draft and self._planner is not None:
                late = self._drafter.behind(request)
                if self._planner.affords(behind + late):
                    behind += late
                else:
                    draft = []
            drafts[place], rates[place] = draft, rate
        if not any(drafts):
            return []
        count, least, longest = self._choose(decodes, drafts, rates)
        if not count and self._drafter.computes and self._planner is not None and (hope := self._planner.hope):
            rates = [min(rate + hope, max(rate, _HOPED)) for rate in rates]
            count, least, longest = self._choose(decodes, drafts, rates)
        if not count:
            return []
        if self._drafter.computes and any(request.unknown for request in decodes):
            self.waits = True
            return []
        drafts = [draft[:longest] for draft in drafts]
        return self._fill(decodes, self._cut(decodes, drafts, rates, count, least))

    def _choose(
        self, decodes: Sequence[Request], drafts: Sequence[list[int]], rates: Sequence[float]
    ) -> tuple[int, float, int]:
        """How many tokens of these drafts to take, the worth of the last one, and the most tokens of a draft."""
        offers: list[tuple[float, int]] = []
        for request, draft, rate in zip(decodes, drafts, rates, strict=True):
            worth = rate**request.unknown
            for place in range(len(draft)):
                worth *= rate
                offers.append((worth, place + 1))
        offers.sort(reverse=True)
        if self._planner is not None:
            return self._planner.choose(len(decodes), offers, computes=self._drafter.computes)
        count = min(self._most_positions - len(decodes), len(offers))
        return count, offers[count - 1][0], MOST_DRAFTED

    def settle(self, step: StepInFlight, output: ModelOutput) -> None:
        """Settles a step whose drafts the host did not know: books the time that drafting took, and cuts off the tokens after
        one that ends its request. With drafts that the host knows, this is done before the step."""
        if not step.drafts or self.late is None:
            return
        seconds, self.late = self._drafter.settle(), None
        if self._planner is not None:
            rows, longest, caught_up = self._late
            self._planner.filled(rows, longest, seconds, caught_up)
        for request, tokens in zip(step.decodes, output.token_ids, strict=False):
            for place, token in enumerate(tokens):
                if token in request.stops:
                    del tokens[place + 1 :]
                    break

    def took(self, step: StepInFlight, output: ModelOutput, now: float) -> None:
        """Notes how many tokens of each draft in a step were right, and the step's cost; the step must be settled.

        Args:
            step: The step; its drafts are none of forced text.
            output: The step's results.
            now: Seconds on the scheduler's clock.
        """
        accepted = 0
        for request, draft, tokens in zip(step.decodes, step.drafts, output.token_ids, strict=False):
            if draft:
                right = len(tokens) - 1
                accepted += right
                self._count(request, len(draft), 0 if request.over else right)
        if step.chunks:
            self.waits = False
        before, self._ended = self._ended, now
        if before is not None and not step.chunks:
            self.measured(len(step.decodes), len(step.plan.token_ids), now - before, accepted)

    def measured(self, rows: int, positions: int, seconds: float, accepted: int = 0) -> None:
        """Notes a step that computed no prompt: its duration, its numbers of requests and sampled positions, and how many draft
        tokens were accepted."""
        if self._planner is not None and rows:
            self._planner.took(rows, positions, accepted, seconds)

    def halted(self) -> None:
        """Nothing is scheduled for a while, or a step has drafts of another kind: that time is none of the next step's."""
        self._ended = None

    def _count(self, request: Request, drafted: int, accepted: int) -> None:
        assert request.drafts is not None
        request.drafts.drafted += drafted
        request.drafts.accepted += accepted
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.drafts += 1
        if self._drafter.computes:
            self._trials.drafted(request.drafts, accepted, wrong=accepted < drafted)

    def _try(self, request: Request, decodes: Sequence[Request]) -> list[list[int]]:
        """Makes a short trial draft for one request, whatever its rate, because otherwise nothing would show that its drafts are
        right again."""
        if any(each.unknown for each in decodes):
            self.waits = True
            return []
        draft, _ = self._draft(request, min(_TRIED, self._most_positions - len(decodes)), 0.0, 0.0)
        self._trials.began(request)
        count = self._room(request, len(draft)) if draft else 0
        return self._fill(decodes, [draft[:count] if each is request else [] for each in decodes]) if count else []

    def _fill(self, decodes: Sequence[Request], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts with all their tokens; empty if there are none."""
        if drafts and self._drafter.computes:
            began, longest = self._clock(), max(map(len, drafts))
            drafts = self._drafter.fill(decodes, drafts)
            self.late, self._late = self._drafter.late, (len(decodes), longest, self._drafter.caught_up)
            if self.late is not None:
                return drafts
            if self._planner is not None and longest:
                self._planner.filled(len(decodes), longest, self._clock() - began, self._drafter.caught_up)
            drafts = [self._usable(request, draft) for request, draft in zip(decodes, drafts, strict=True)]
        return drafts if any(drafts) else []

    @staticmethod
    def _worth(request: Request, draft: Sequence[int]) -> float:
        """How many tokens of a draft are expected to be right."""
        if not draft:
            return 0.0
        assert request.drafts is not None
        rate = min(request.drafts.rate, 1 - 1e-9)
        return float(rate ** (request.unknown + 1) * (1 - rate ** len(draft)) / (1 - rate))

    def _draft(self, request: Request, most: int, least: float, worthless: float) -> tuple[list[int], float]:
        """The draft of a request, and its rate. Below a rate of ``least`` nothing is drafted; no token is worth less than
        ``worthless``."""
        if not may_draft(request):
            return [], 0.0
        drafts = request.drafts
        computes = self._drafter.computes
        if drafts is None:
            drafts = request.drafts = RequestDrafts(
                self._drafter.begin(request), self._trials.rate if computes else 0.0
            )
        elif not computes and drafts.rate < _HOPELESS and (len(request.token_ids) + request.serial) % _SELDOM:
            return [], 0.0
        rate, unknown = drafts.learn(self._trials.rate if computes else None), request.unknown
        most = min(most, request.max_length - len(request.token_ids) - unknown - 1)
        draft = drafts.drafter.propose(unknown, most if rate >= least else 0)
        worth = rate**unknown
        for count in range(len(draft)):
            worth *= rate
            if worth < worthless:
                draft = draft[:count]
                break
        return draft if computes else self._usable(request, draft), rate

    def _usable(self, request: Request, draft: list[int]) -> list[int]:
        """The draft, cut after a token that ends the request and before one that its grammar forbids."""
        for count, token in enumerate(draft):
            if token in request.stops:
                draft = draft[:count]
                break
        return draft[: request.grammar.validate(draft)] if draft and request.grammar is not None else draft

    def _cut(
        self, decodes: Sequence[Request], drafts: list[list[int]], rates: Sequence[float], count: int, least: float
    ) -> list[list[int]]:
        """The drafts, cut to a total number of tokens and to the free pages. No token in them is worth less than ``least``."""
        left = count
        for index, (request, draft, rate) in enumerate(zip(decodes, drafts, rates, strict=True)):
            if not draft:
                continue
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


# When a draft model is tried though its drafts were wrong: what it would have drafted is known only if it is
# asked.
_FIRST_RATE = 0.7
_WEIGHT, _SURE = 0.05, 3
"""How much one draft changes the rate, and how many drafts the first rate counts as."""
_HOPE_AGAIN = 0.15
"""Below this rate, trials of a request become rarer."""
_SOON, _LATE = 32, 2048
"""After how many steps without drafts, or tokens of a request, a trial is made: at first, and at most. Each failed trial doubles
the steps, and also the tokens if the rate is low."""


class Trials:
    """Counts steps and decides when to try. A new object trusts the drafter.

    Attributes:
        rate: How often the draft tokens of all requests were right lately; a new request begins with this rate.
    """

    def __init__(self) -> None:
        self.rate = _FIRST_RATE
        self._turn = 0
        self._known = 0
        self._patience = _SOON
        self._steps = 0

    def due(self) -> bool:
        """Whether this step should make a trial; called for each step that may draft."""
        self._steps += 1
        return self._steps > self._patience

    def choose(self, requests: Sequence[Request]) -> Request | None:
        """The request to try. Requests take turns; those whose trial failed recently are left out. O(requests)."""
        count = len(requests)
        for each in (requests[(self._turn + place) % count] for place in range(count)):
            if each.drafts is None or len(each.token_ids) >= each.drafts.tried_again:
                return each
        return None

    def began(self, request: Request) -> None:
        """Notes a trial of a request; it counts as failed unless :meth:`drafted` reports otherwise."""
        self._turn += 1
        self._steps = 0
        self._patience = min(2 * self._patience, _LATE)
        if (drafts := request.drafts) is not None:
            drafts.patience = min(2 * drafts.patience, _LATE) if drafts.rate < _HOPE_AGAIN else 0
            drafts.patience = drafts.patience or _SOON
            drafts.tried_again = len(request.token_ids) + drafts.patience

    def drafted(self, drafts: RequestDrafts, right: int, *, wrong: bool) -> None:
        """Notes a checked draft of a request: how many tokens were right before the first wrong one, if any."""
        self._steps = 0
        self.rate = learned(self.rate, right, int(wrong), max(_WEIGHT, 1 / (_SURE + 1 + self._known)))
        self._known += right + wrong
        if right:
            self._patience = _SOON
            drafts.patience = drafts.tried_again = 0
