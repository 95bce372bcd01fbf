"""What a request's objective means for it: which workers can meet it, which requests make way, and which are refused.

The router measures how long workers take to a request's first token: at idle workers by the tokens of its prompt, at others how
much longer, by the tokens that are queued and the requests that run; and how long for each further token, by the requests that
they generate for. Each is a straight line (least squares, late samples count most), for each worker, and for short and long
prompts apart, as workers let short ones pass. A worker that is at as many requests as it runs at once lets the next wait until
one ends. What is predicted to be waited is multiplied by a margin, so that nine of ten real times are below the prediction.

- A request whose objective no worker is predicted to meet is refused (shed), and nothing is charged for it. It is told to come
  again when so much of the queued work will be done that it would be met, and so many as were shed lately could be served before
  it: those come again, too.
- The others go to workers that are predicted to meet it; the policy chooses among these.
- **Classes** are priorities. While a class with an objective has requests, requests of lower classes are given only to workers
  that would still meet that objective for a prompt of the usual length. If none would, they wait (held). If a request of the
  class can be served only without what was already given away, requests of lower classes that have no token yet return to the
  queue (preempted), the lowest class and the latest first.

Nothing is measured, held or decided for a model until a request with an objective comes for it, nor when none came for ten
minutes. What is not known yet is admitted; so is one request now and then where nothing was measured for two seconds, as else
a few slow answers would refuse all requests for ever.

Complexity: O(workers) for a request with an objective, of a large fleet those on its shortlist and, if none of these can meet it,
64 drawn ones; O(1) for the others while the worker that had headroom last still has, else likewise. Bound: the lines of so many
workers, and the requests that have no token yet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sapwood_net.pacing.sliding_count import SlidingCount
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import LinearFit
from sapwood_router.request.caller import Caller
from sapwood_router.request.objective import MET, MISSED, ShedError
from sapwood_router.routing.policies.cache_aware import REQUEST_COST

SHORT = 1024
"""Prompts with at most so many tokens to compute are measured apart from longer ones."""
LEAST_SAMPLES = 8
"""So many first tokens are measured before a prediction is believed."""
PROBE_SECONDS = 2.0
"""Where nothing was measured for so long, one request is admitted whatever is predicted."""
LIVE_SECONDS = 10.0
"""For so long after its last request came, a class has headroom kept for it."""
FORGET_SECONDS = 600.0
"""For so long after the last request with an objective, a model's requests are measured."""
KEPT_SHARE = 0.8
"""The share of a class's targets that lower classes may use up."""
MOST_LOOKED_AT = 64
"""Workers that are looked at in a large fleet, drawn at random."""
_RATE_SECONDS = 10.0
"""Over how many seconds admitted and shed requests are counted."""
_LONGEST_WAIT = 60.0
"""No request is told to come again later than that."""
_UP, _DOWN = math.exp(0.09), math.exp(-0.01)
"""Steps of the margin: it settles where nine of ten real times are below the prediction."""
_LEAST_MARGIN, _MOST_MARGIN = 0.5, 4.0
_PRIOR = 1024.0**2
"""How much a belief weighs against samples: as much as one with 1024 tokens ahead."""
_USUAL_KEPT = 0.9
_FIRST_KEPT = 0.98


class _Slope:
    """Seconds that grow with an amount and are 0 for none, by least squares, late samples counting most. O(1)."""

    def __init__(self) -> None:
        self._squares = self._products = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Takes a sample."""
        self._squares = self._squares * _FIRST_KEPT + amount * amount
        self._products = self._products * _FIRST_KEPT + amount * seconds

    def at(self, amount: float, expected: float) -> float:
        """Seconds for that amount; ``expected`` is what is believed where there are few samples, or only of small amounts."""
        return (amount * self._products + _PRIOR * expected) / (self._squares + _PRIOR)


class Pace:
    """How fast one worker is, or all of a model's together, for short and for long prompts.

    A first token takes what it took at idle workers, and more the more is ahead of it: with nothing ahead a busy worker's past
    predicts nothing. That a place has to become free is counted apart.
    """

    def __init__(self) -> None:
        self._idle = {False: LinearFit(), True: LinearFit()}
        self._ahead = {False: _Slope(), True: _Slope()}
        self._step = LinearFit()
        self._lasts = LinearFit()
        self._samples = {False: 0, True: 0}
        self._margin = {False: 1.0, True: 1.0}

    def knows(self, *, long: bool) -> bool:
        """Whether it can predict the first token of prompts of this kind."""
        return self._samples[long] >= LEAST_SAMPLES

    def first_token(self, tokens: float, ahead: float, over: float, *, long: bool) -> float:
        """Seconds to the first token.

        Args:
            tokens: Of the prompt, to be computed.
            ahead: What the worker has to do before or beside, in tokens.
            over: How many requests have to end before it is begun, over how many run at once.
            long: The kind of its prompt.
        """
        idle = self._idle[long]
        alone = idle.at(tokens)
        behind = self._ahead[long].at(ahead, expected=idle.at(tokens + ahead) - alone)  # as if it were one prompt
        return alone + self._margin[long] * (behind + over * self._lasts.at(1))

    def each_token(self, requests: float) -> float:
        """Seconds for a further token next to so many requests, itself included; 0: not known."""
        return self._step.at(requests)

    def began(self, tokens: float, ahead: float, over: float, seconds: float, *, long: bool) -> None:
        """A first token came after so many seconds; the rest as for :meth:`first_token`."""
        if (ahead or over) and self.knows(long=long):
            late = seconds > self.first_token(tokens, ahead, over, long=long)
            margin = self._margin[long] * (_UP if late else _DOWN)
            self._margin[long] = min(_MOST_MARGIN, max(_LEAST_MARGIN, margin))
        self._samples[long] += 1
        if ahead:
            waited = seconds - over * self._lasts.at(1) - self._idle[long].at(tokens)
            self._ahead[long].add(ahead, max(0.0, waited))
        else:
            self._idle[long].add(tokens, seconds, _FIRST_KEPT)

    def ended(self, tokens: int, seconds: float, requests: float) -> None:
        """An answer ended that had so many tokens after its first, next to so many requests, itself included."""
        if tokens > 0:
            self._step.add(requests, seconds / tokens)
        self._lasts.add(1, seconds)


@dataclass(slots=True)
class _Class:
    """What a class asks for.

    Attributes:
        until: When headroom is no longer kept for it, unless requests of it run.
        running: How many run.
        first_token, each_token: Its tightest targets lately; 0: it has none.
        tight_until: How long these hold.
        lacking: Prompt tokens that its requests usually have to compute.
    """

    until: float = 0.0
    running: int = 0
    first_token: float = 0.0
    each_token: float = 0.0
    tight_until: float = 0.0
    lacking: float = 0.0


class _Model:
    """What is known of one model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.paces: dict[str, Pace] = {}
        self.all = Pace()
        self.measured = {False: -math.inf, True: -math.inf}
        """When a first token was last measured, or let pass to be measured, by the kind of prompt."""
        self.used = -math.inf
        self.classes: dict[int, _Class] = {}
        self.lower_lacking = 0.0
        """Prompt tokens that requests without an objective usually have to compute."""
        self.admitted = SlidingCount(_RATE_SECONDS, clock)
        self.shed = SlidingCount(_RATE_SECONDS, clock)
        """Requests with an objective that were given to workers, and that were refused."""
        self.had_headroom: Worker | None = None
        """The worker that was last found to have headroom for a class."""
        self.unanswered: dict[str, dict[Pursuit, None]] = {}
        """By worker the requests there that have no token yet, the earliest first."""

    def pace(self, address: str, *, long: bool) -> Pace | None:
        """The worker's if it is known, else all workers'; None: nothing is known."""
        own = self.paces.get(address)
        if own is not None and own.knows(long=long):
            return own
        return self.all if self.all.knows(long=long) else None

    def first_token(self, worker: Worker, lacking: float, more_tokens: float = 0, more_requests: int = 0) -> float:
        """Predicted seconds to the first token of a request given to a worker now; 0: nothing is known.

        Args:
            worker: The worker.
            lacking: Prompt tokens that the worker has to compute for it.
            more_tokens, more_requests: What else it is given before; below 0: what is taken from it.
        """
        long = lacking > SHORT
        pace = self.pace(worker.address, long=long)
        if pace is None:
            return 0.0
        view = worker.view()
        requests = max(0, view.requests + more_requests)
        ahead = max(0.0, view.queued_tokens + more_tokens) + REQUEST_COST * requests
        return pace.first_token(lacking, ahead, _over(worker, requests), long=long)

    def idle_first_token(self, worker: Worker, lacking: float) -> float:
        """The same if the worker had nothing else to do."""
        long = lacking > SHORT
        pace = self.pace(worker.address, long=long)
        return 0.0 if pace is None else pace.first_token(lacking, 0, 0, long=long)

    def each_token(self, worker: Worker, more_requests: int = 1) -> float:
        """Predicted seconds for each further token next to the worker's requests and so many more; 0: not known."""
        pace = self.paces.get(worker.address)
        return (pace or self.all).each_token(worker.view().requests + more_requests)

    def has_headroom(self, worker: Worker, each: _Class, tokens: float, requests: int) -> bool:
        """Whether a worker would still meet a class's objective if it were given so much more. A target that it cannot meet even
        alone says nothing."""
        if each.first_token:
            most = KEPT_SHARE * each.first_token
            if self.first_token(worker, each.lacking, tokens, requests) > most:
                return self.idle_first_token(worker, each.lacking) > most
        if each.each_token:
            most = KEPT_SHARE * each.each_token
            if self.each_token(worker, requests + 1) > most:
                pace = self.paces.get(worker.address) or self.all
                return pace.each_token(1) > most
        return True

    def live(self) -> list[tuple[int, _Class]]:
        """The classes that headroom is kept for, the highest first."""
        now = self.clock()
        for priority in [priority for priority, each in self.classes.items() if not each.running and each.until < now]:
            del self.classes[priority]
        return sorted(self.classes.items(), reverse=True)

    def forget(self, present: Callable[[str], bool]) -> None:
        """Forgets workers that are gone."""
        for address in [address for address in self.paces if not present(address)]:
            del self.paces[address]


class Headroom:
    """What all requests share. Lives on one event loop.

    Args:
        registry: Knows the workers.
        clock: Seconds, monotonic.
        rng: Spreads the times after which refused requests come again.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float], rng: random.Random) -> None:
        self._registry = registry
        self._clock = clock
        self._rng = rng
        self._models: dict[str, _Model] = {}
        """Those that requests with an objective came for lately."""

    def begin(self, model: str, caller: Caller, came: float, preempt: Callable[[], None]) -> Pursuit | None:
        """A request came; None: nothing is to be done about objectives. The caller ends it, whatever becomes of it.

        Args:
            model: Which it is for.
            caller: Whose it is.
            came: When, on the clock.
            preempt: Takes it from its worker, and has it wait again.
        """
        found = self._models.get(model)
        if caller.objective is None:
            if found is None:
                return None
            if self._clock() - found.used > FORGET_SECONDS:
                del self._models[model]
                return None
            return Pursuit(found, caller, came, preempt, self._rng)
        if found is None:
            found = self._models[model] = _Model(self._clock)
        now = found.used = self._clock()
        asked, each = caller.objective, found.classes.setdefault(caller.priority, _Class())
        tighter = (0 < asked.first_token < each.first_token) or (0 < asked.each_token < each.each_token)
        if tighter or each.tight_until < now:
            each.first_token, each.each_token = asked.first_token, asked.each_token
            each.tight_until = now + LIVE_SECONDS
        each.until = now + LIVE_SECONDS
        each.running += 1
        if len(found.paces) > 2 * len(self._registry.all()) + LEAST_SAMPLES:
            found.forget(lambda address: self._registry.find(address) is not None)
        return Pursuit(found, caller, came, preempt, self._rng)

    def floor(self, model: str, taken: int) -> int | None:
        """The lowest class that may be given to a worker now; None: any.

        Args:
            model: Which.
            taken: Requests that are about to be given to workers.
        """
        found = self._models.get(model)
        if found is None or not found.classes:
            return None
        tokens, requests = found.lower_lacking * (taken + 1), taken + 1
        for priority, each in found.live():
            last = found.had_headroom
            if last is not None and last.takes_new and found.has_headroom(last, each, tokens, requests):
                continue
            workers = drawn(self._registry.available(model), self._rng)
            found.had_headroom = next(
                (one for one in workers if one.takes_new and found.has_headroom(one, each, tokens, requests)), None
            )
            if found.had_headroom is None:
                return priority
        return None


class Pursuit:
    """One request's part in it.

    Attributes:
        objective: Its objective; None: it has none.
    """

    def __init__(
        self, model: _Model, caller: Caller, came: float, preempt: Callable[[], None], rng: random.Random
    ) -> None:
        self.objective = caller.objective
        self.priority = caller.priority
        self._model = model
        self._came = came
        self._preempt = preempt
        self._rng = rng
        self._worker: Worker | None = None
        self._lacking = 0.0
        self._ahead = self._over = 0.0
        self._sent = 0.0
        self._first: float | None = None
        self._beside = 0
        self._slow_client = False
        self._over_now = False

    @property
    def latest(self) -> float:
        """When its first token would be too late, on the clock."""
        first = 0.0 if self.objective is None else self.objective.first_token
        return self._came + first if first else math.inf

    @property
    def is_free(self) -> bool:
        """Whether it may go to any worker: it has no objective, and goes before all that have."""
        return self.objective is None and not any(priority > self.priority for priority, _ in self._model.live())

    def check(self, workers: Sequence[Worker], held: Mapping[str, tuple[int, float]], tokens: int) -> None:
        """Whether a worker is predicted to meet its objective; if only without requests of lower classes, they are sent back.

        Args:
            workers: Those that can take it.
            held: By address how many of the prompt's tokens they hold.
            tokens: Of the prompt.

        Raises:
            ShedError: None is.
        """
        if self.objective is None or any(self._meets(worker, _lacking(worker, held, tokens)) for worker in workers):
            return
        if self._probes(workers, held, tokens) or self._make_way(workers, held, tokens):
            return
        raise self.refusal(workers, held, tokens)

    def narrow(self, workers: Sequence[Worker], held: Mapping[str, tuple[int, float]], tokens: int) -> list[Worker]:
        """Those of the workers that it should go to, may be none. The arguments are those of :meth:`check`."""
        higher = [each for priority, each in self._model.live() if priority > self.priority]
        found = []
        for worker in workers:
            lacking = _lacking(worker, held, tokens)
            if (self.objective is None or self._meets(worker, lacking)) and all(
                self._model.has_headroom(worker, each, lacking, 1) for each in higher
            ):
                found.append(worker)
        return found

    def refusal(self, workers: Sequence[Worker], held: Mapping[str, tuple[int, float]], tokens: int) -> ShedError:
        """Why it is refused, and when to come again. The arguments are those of :meth:`check`."""
        assert self.objective is not None, "others are not refused for it"
        model, target = self._model, self.objective.first_token
        lacks = [(worker, _lacking(worker, held, tokens)) for worker in workers]
        wait, alone = 0.0, False
        said = f"a token every {1000 * self.objective.each_token:g} ms"
        if target:
            spent = model.clock() - self._came
            soonest = min((model.first_token(worker, lacking) for worker, lacking in lacks), default=0.0) + spent
            idle = min((model.idle_first_token(worker, lacking) for worker, lacking in lacks), default=0.0)
            if soonest > target:
                alone = idle > target
                wait = max(0.0, soonest - max(target, idle))
                said = f"the first token within {1000 * target:g} ms, it would take about {1000 * soonest:.0f} ms"
        why = "no worker can, even when idle" if alone else "the workers have too much to do"
        wait += model.shed.total() * _RATE_SECONDS / max(1.0, model.admitted.total())
        model.shed.add()
        delay = min(_LONGEST_WAIT, max(PROBE_SECONDS if alone else 0.1, wait)) * self._rng.uniform(1.0, 1.5)
        return ShedError(f"the objective cannot be met: {said}: {why}", retry_after=delay)

    def sent(self, worker: Worker, lacking: float, *, may_return: bool = True) -> None:
        """A worker is asked, and has the request on its account.

        Args:
            worker: The worker.
            lacking: Prompt tokens that it has to compute.
            may_return: Whether the request may be sent back while it has no token.
        """
        self.left()
        model, view = self._model, worker.view()
        self._worker, self._lacking, self._sent, self._first = worker, max(1.0, lacking), model.clock(), None
        others = max(0, view.requests - 1)
        self._ahead = max(0.0, view.queued_tokens - self._lacking) + REQUEST_COST * others
        self._over = _over(worker, others)
        if may_return:
            model.unanswered.setdefault(worker.address, {})[self] = None
        each = model.classes.get(self.priority) if self.objective is not None else None
        if self.objective is not None:
            model.admitted.add()
        if each is not None:
            each.lacking = _usual(each.lacking, self._lacking)
        else:
            model.lower_lacking = _usual(model.lower_lacking, self._lacking)

    def answers(self) -> None:
        """The worker's first token has come."""
        worker, model = self._worker, self._model
        if worker is None or self._first is not None:
            return
        self._is_answered(worker)
        now = self._first = model.clock()
        self._beside = worker.generating
        long = self._lacking > SHORT
        model.measured[long] = now
        for pace in (model.paces.setdefault(worker.address, Pace()), model.all):
            pace.began(self._lacking, self._ahead, self._over, now - self._sent, long=long)

    def client_is_slow(self) -> None:
        """The worker waits for the client: times after this say nothing about the worker."""
        self._slow_client = True

    def ended(self, tokens: int) -> None:
        """The worker's answer is complete; so many of its tokens are its own."""
        worker, model = self._worker, self._model
        if worker is None or self._first is None or self._slow_client:
            return
        beside = (self._beside + worker.generating + 1) / 2
        for pace in (model.paces.setdefault(worker.address, Pace()), model.all):
            pace.ended(tokens - 1, model.clock() - self._first, beside)

    def outcome(self, first_seconds: float, each_seconds: float) -> str:
        """Whether the objective was met; empty: it has none.

        Args:
            first_seconds: To the first token.
            each_seconds: For each further one, on average; 0: there was none.
        """
        asked = self.objective
        if asked is None:
            return ""
        late = bool(asked.first_token) and first_seconds > asked.first_token
        slow = bool(asked.each_token) and each_seconds > asked.each_token
        return MISSED if late or slow else MET

    def close(self) -> None:
        """The request is over. May be called again."""
        if self._over_now:
            return
        self._over_now = True
        self.left()
        self._preempt = _nothing
        if self.objective is not None and (each := self._model.classes.get(self.priority)) is not None:
            each.running -= 1

    def left(self) -> None:
        """The worker is no longer asked. May be called again."""
        if self._worker is not None:
            self._is_answered(self._worker)
            self._worker = None

    def _is_answered(self, worker: Worker) -> None:
        """It no longer waits for its first token there."""
        waiting = self._model.unanswered.get(worker.address)
        if waiting is not None:
            waiting.pop(self, None)
            if not waiting:
                del self._model.unanswered[worker.address]

    def _meets(self, worker: Worker, lacking: float, more_tokens: float = 0, more_requests: int = 0) -> bool:
        model, asked = self._model, self.objective
        assert asked is not None, "it is asked of requests that have one"
        if asked.first_token:
            spent = model.clock() - self._came
            if spent + model.first_token(worker, lacking, more_tokens, more_requests) > asked.first_token:
                return False
        return not asked.each_token or model.each_token(worker, more_requests + 1) <= asked.each_token

    def _probes(self, workers: Sequence[Worker], held: Mapping[str, tuple[int, float]], tokens: int) -> bool:
        """Whether it is admitted to measure what prompts of its kind take now."""
        model = self._model
        long = min((_lacking(worker, held, tokens) for worker in workers), default=0.0) > SHORT
        if model.clock() - model.measured[long] < PROBE_SECONDS:
            return False
        model.measured[long] = model.clock()
        return True

    def _make_way(self, workers: Sequence[Worker], held: Mapping[str, tuple[int, float]], tokens: int) -> bool:
        """Sends requests of lower classes back that have no token yet: of one worker, as few of their tokens as it takes to meet
        the objective. Returns whether that is enough."""
        fewest, chosen = math.inf, list[Pursuit]()
        for worker in workers:
            lower = [each for each in self._model.unanswered.get(worker.address, ()) if each.priority < self.priority]
            lower.reverse()
            lower.sort(key=lambda each: each.priority)
            lacking, freed = _lacking(worker, held, tokens), 0.0
            for count, each in enumerate(lower, 1):
                freed += each._lacking
                if freed >= fewest:
                    break
                if self._meets(worker, lacking, -freed, -count):
                    fewest, chosen = freed, lower[:count]
                    break
        for each in chosen:
            each._preempt()
        return bool(chosen)


def drawn(workers: Sequence[Worker], rng: random.Random) -> Sequence[Worker]:
    """The workers; of a large fleet some that are drawn."""
    return workers if len(workers) <= MOST_LOOKED_AT else rng.sample(workers, MOST_LOOKED_AT)


def _nothing() -> None:
    """Stands for what a request that is over would do."""


def _lacking(worker: Worker, held: Mapping[str, tuple[int, float]], tokens: int) -> float:
    return max(1.0, tokens - held.get(worker.address, (0, 0.0))[0])


def _over(worker: Worker, requests: int) -> float:
    """How many of a worker's requests have to end before one more is begun, over how many it runs at once."""
    most = 0 if worker.model is None else worker.model.max_running
    return max(0, requests + 1 - most) / most if most else 0.0


def _usual(before: float, now: float) -> float:
    return now if not before else _USUAL_KEPT * before + (1 - _USUAL_KEPT) * now
