"""What each way to do a request would cost::

    cost = its own seconds (wait and prefill, hand-over, generating)
         + seconds that its prompt takes from each other request of that worker: those that generate wait for it, and those who
           will have come to queue behind it when it is computed, if as many come as in the last seconds
         + seconds that its place in each step takes from those that its worker generates for

Beside whom a request will generate counts those that are on their way, too: who waits at the worker, and for decode workers their
share of the prompts that are computed to be handed off. If many requests come at once, none of them generates yet. In the next
seconds as many
are believed to come as were computed in the last, not as were asked for: many that come at once queue before it, and none behind.

The sum of that over all requests is what a fleet can make small; see ``costs.py`` for how the parts are measured. On mixes of
chats and documents this answers about as many requests as the better of ``always`` and ``never``, or more
(``tests/router/flow/disaggregation/test_mixes.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from sapwood_router.fleet.served_model import Role
from sapwood_router.fleet.worker import PROMPT_SECONDS, Worker
from sapwood_router.flow.disaggregation.costs import ModelCosts
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import Shadowed
from sapwood_router.routing.worker_view import WorkerView

MOST_PREFILLING = 0.9
"""The largest share of a worker's time that prompts are believed to take."""


class Estimate(msgspec.Struct, frozen=True):
    """A request's cost in one way, in seconds.

    Attributes:
        worker: Address of the worker that computes the prompt.
        decode_worker: Address of the worker that generates; empty: the same.
        role: The first one's.
        prefill: Until the first token: the wait for what is queued before, and the prompt.
        transfer: From there to the decode worker's first token.
        generate: The rest of the answer.
        delay: Taken by its prompt from the other requests of that worker, summed over them.
        crowding: Taken from them by its place in each step, likewise.
    """

    worker: str
    decode_worker: str
    role: Role
    prefill: float
    transfer: float
    generate: float
    delay: float
    crowding: float

    @property
    def total(self) -> float:
        """What the least is taken of."""
        return self.prefill + self.transfer + self.generate + self.delay + self.crowding


class Weighed(NamedTuple):
    """A worker that could do a request alone.

    Attributes:
        pages: What its pages hold; empty: not known.
        estimate: What the request would cost there.
        lacking: Tokens of the prompt that it does not hold.
        queue: Seconds of the prompts that are queued there now.
    """

    pages: bytes
    estimate: Estimate
    lacking: int
    queue: float


class Alone:
    """What a request would cost at a worker that does all of it.

    Args:
        policy: Knows what workers hold of the prompt.
        costs: Measured so far.
        prompt: The request's.
        output: Tokens that it will likely generate.
    """

    def __init__(self, policy: Shadowed, costs: ModelCosts, prompt: PromptPages, output: float) -> None:
        self._policy = policy
        self._costs = costs
        self._prompt = prompt
        self._output = output

    def of_each(self, workers: Mapping[Role, Sequence[Worker]]) -> dict[Role, list[Weighed]]:
        """For each worker, by its role; roles without a worker are left out."""
        views = {worker: worker.view() for of_role in workers.values() for worker in of_role}
        held = self._policy.explain(list(views.values()), self._prompt) if views else {}
        coming = sum(worker.handing_off for worker in views) / (len(workers[Role.DECODE]) or 1)
        return {
            role: [
                self._of(
                    role,
                    worker,
                    views[worker],
                    lacking=len(self._prompt.token_ids) - held.get(worker.address, (0, 0.0))[0],
                    coming=coming if role is Role.DECODE else 0.0,
                )
                for worker in of_role
            ]
            for role, of_role in workers.items()
            if of_role
        }

    def _of(self, role: Role, worker: Worker, view: WorkerView, *, lacking: int, coming: float) -> Weighed:
        costs, output = self._costs, self._output
        beside = worker.in_flight - worker.embedding - worker.handing_off + coming
        until_first, queue = costs.prefill(view.queued_tokens + lacking), costs.prefill(view.queued_tokens)
        behind = until_first * worker.prompts.total() / PROMPT_SECONDS
        foreign = view.requests - worker.in_flight
        estimate = Estimate(
            worker.address,
            "",
            role,
            prefill=until_first,
            transfer=0.0,
            generate=costs.generate(output - 1, beside, prefilling(worker, costs)),
            delay=(worker.generating + foreign + behind) * (until_first - queue),
            crowding=costs.crowding(output - 1, beside),
        )
        return Weighed(b"" if worker.model is None else worker.model.pages, estimate, lacking, queue)


def cheapest_pair(weighed: Mapping[Role, Sequence[Weighed]], costs: ModelCosts, *, free: bool) -> Estimate | None:
    """The pair of a prefill and a decode worker that costs least; None: there is none whose pages fit each other.

    Args:
        weighed: The cost of the request at each of them alone.
        costs: Know what a hand-over takes.
        free: Whether it is taken to cost nothing.
    """
    firsts: dict[bytes, Estimate] = {}
    """Among prefill workers with equal page fingerprints, the one that is done first, including other requests' delay."""
    for each in weighed.get(Role.PREFILL, ()):
        firsts[each.pages] = min(firsts.get(each.pages, each.estimate), each.estimate, key=_first)
    pairs = []
    for then in weighed.get(Role.DECODE, ()):
        if fitting := [first for pages, first in firsts.items() if fit({pages}, {then.pages})]:
            handover = 0.0 if free else costs.handover(then.lacking)
            pairs.append(_pair(min(fitting, key=_first), then, handover))
    return min(pairs, key=total, default=None)


def _pair(first: Estimate, then: Weighed, handover: float) -> Estimate:
    """One worker computes the prompt, and another generates."""
    return msgspec.structs.replace(
        first,
        decode_worker=then.estimate.worker,
        transfer=handover + max(0.0, then.queue - first.prefill),
        generate=then.estimate.generate,
        crowding=then.estimate.crowding,
    )


def fit(some: set[bytes], others: set[bytes]) -> bool:
    """Whether a worker of some and one of others have pages that fit each other, as far as they say."""
    return bool(some & others) or b"" in some or b"" in others


def total(estimate: Estimate) -> float:
    """What the least is taken of."""
    return estimate.total


def _first(estimate: Estimate) -> float:
    return estimate.prefill + estimate.delay


def prefilling(worker: Worker, costs: ModelCosts) -> float:
    """The share of a worker's time that prompts have taken lately."""
    return min(MOST_PREFILLING, costs.prefill(worker.prompted.total()) / PROMPT_SECONDS)
