"""How many drafted tokens a step takes, so that drafting never loses more than a small share of the time.

Each row has offered its draft with what each token is worth: the chance that it is used. Of all rows' tokens a step takes as many
of the likeliest as bring the most tokens a second by the measured times of steps. Times that are not known are tried from the
smallest draft up, as long as they would pay if one more rung of the ladder cost nothing.

What all that may lose is bounded by two accounts, in durations of steps without drafts. Each gets a share of the time that
passes and what drafts have gained, up to a bound. It pays for drafts that brought less than their time was worth, for the slow
step after them, and for looking in vain. Nothing is looked for, tried or drafted that the accounts cannot pay. The first
account books what drafts promised, times the share of promises that is kept: a run of luck neither pays nor costs, so this
account can be small. The second books what was right, and bounds the loss whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_worker.core.scheduler.speculation.draft_costs import DraftCosts
from sapwood_worker.core.scheduler.speculation.step_costs import StepCosts

SHARE = 0.005
"""The share of the time that drafts may lose."""
_FIRST, _MOST, _LEAST = 6.0, 12.0, 1.0
"""The first account: what is on it at the start, the most that may be on it, and the least that a look or a trial needs."""
_FIRST_REAL, _MOST_REAL, _LEAST_REAL = 10.0, 12.0, 3.0
"""The same for the second account."""
_CLEARLY = 1.03
"""Times as many tokens a second that drafting must promise: measurements are noisy."""
_HOPE, _SPARE = 0.1, 0.75
"""How much better drafts may be than their measured rate, and the part of the first account that may be spent to find out."""
_FORGET, _TRUST = 0.98, 8.0
"""What a step leaves of the memory of promises, and the kept promises, in tokens, that it begins with."""
_FORGIVE = 0.0005
"""How much a step without drafts restores trust in promises."""
_OUTLIER = 2.0
"""A duration of more than so many times what such steps usually take is the machine's doing and not the draft's."""
_MUCH = 64
"""Tokens of requests' past that a drafter may compute in a step whose time counts."""
_CATCH_UP = 1 / 64
"""A guess of what it costs to compute a token of the past, in plain steps."""
_DEPTHS = (1, 2, 3, 4, 5, 7, 10, 15, 22, 31)
"""Tokens of the longest draft that are compared, where each takes time."""
_LOOK = 0.25
"""Plain steps that a look takes at most: requests that nobody looked at for long, and new ones, take a while."""
_DRAFTED_STEPS, _PLAIN_STEPS = 512, 3
"""After so many steps with drafts in a row, so many without are measured again."""


class Planner:
    """Plans and keeps the account. Pure: it sees no clock, no request and no token.

    Args:
        most_positions: Most sampled positions of a step.
        longest: Most tokens of a draft.
        costs: What steps cost, if something is known already.

    Attributes:
        costs: What steps cost.
        credit: What is on the first account, in steps without drafts.
        real: What is on the second.
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
        """Whether drafts of so many requests are to be looked at: if all were right it would pay, and the accounts can pay."""
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
        """What to take; :meth:`looks` must have said yes.

        Args:
            rows: Requests.
            offers: The chance of each token that is offered, and its place in its draft from 1 on, the highest chance first; at
                least one.
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
        """How many of these tokens to take if drafting takes ``extra`` seconds, the last one's chance, and the tokens a second
        that it promises."""
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
        if hope > best * _CLEARLY:  # from the smallest draft up: what it costs may tell that a longer one cannot pay
            best, taken = hope, tried[0][1]
        return taken, chances[taken - 1] if taken else 0.0, best

    def filled(self, rows: int, longest: int, seconds: float, caught_up: int) -> None:
        """Notes how long it took to compute drafts for ``rows`` requests.

        Args:
            rows: The requests.
            longest: Tokens of the longest draft.
            seconds: How long it took.
            caught_up: Tokens of requests' past that were computed before the drafts.
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
        """How much better than their rates say drafts are taken to be: what the accounts can spare is spent on finding out."""
        return _HOPE if self.credit > _SPARE * _MOST and self.real > _LEAST_REAL else 0.0

    def affords(self, tokens: int) -> bool:
        """Whether the account can pay for computing so many tokens of requests' past."""
        return tokens <= _MUCH or tokens * self._caught_up <= self.credit

    def drafted(self, promised: float) -> None:
        """The coming step checks drafts that are worth so many tokens in all."""
        self._promised = promised

    def patience(self, rows: int) -> float:
        """Seconds that a look at so many requests may take; :meth:`looks` must have said yes."""
        plain = self.costs.plain(rows)
        assert plain is not None
        return _LOOK * plain

    def looked(self, rows: int, seconds: float) -> None:
        """It took so long to find that nothing is to be drafted."""
        plain = self.costs.plain(rows)
        if plain is not None:
            self._book(-seconds / plain, -seconds / plain)

    def took(self, rows: int, positions: int, accepted: int, seconds: float) -> None:
        """Notes a step that computed no prompt.

        Args:
            rows: Its requests.
            positions: The positions that it sampled.
            accepted: Drafted tokens of it that were right.
            seconds: From the end of the step before to its own.
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
