"""Whether one worker computes a request's prompt and another generates, and which workers are for what.

A request is disaggregated where the router may, and where a prefill and a decode worker can be asked. Then it makes two tries on
purpose: a prefill worker computes the prompt and the first token and answers with a ticket for the prompt's pages; a decode
worker gets prompt, token and ticket. For a decode worker this is like a request that continues after a loss: the request has all
its tokens, and the ticket only saves computation. So whatever is lost on the way costs time and nothing else:

- no prefill worker can be asked: the request is computed in one place;
- the prefill worker is lost before the ticket comes: another is asked;
- it is lost afterwards: the decode worker computes what it did not get;
- the decode worker is lost: another one gets the ticket, as long as its lease is renewed; else the request begins again at a
  prefill worker, with what was generated so far as part of the prompt.

Roles are preferences: if no other worker is available, any worker serves any request whole.

``auto`` places a request as ``never`` does, by the policy among the workers of all roles, unless another way is known to cost
less. That is the least of what the cheapest pair and the cheapest worker alone would cost (``weighing.py``; the policy then
chooses whom, of the role that costs least, or of all where their costs are nearly the same).

Nothing is weighed while many wait for their first token beside those that generate, as when many come at once: such a fleet's
next second differs from its last ones, and the policy, which counts requests and their tokens, spreads them more
evenly. Nor is anything weighed where no worker has a request: there is none that a pair could spare anything, and the next may be
one of many.

The time of a KV transfer is measured on real transfers. Until enough were measured, and where none was for long, it is taken
to cost nothing, now and then: so one is begun only to measure it where it could pay at all, and none where it could not.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from sapwood_common.errors import InvalidArgumentError, UnavailableError
from sapwood_router.fleet.eligibility import Demand, eligible
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import PROBE_SECONDS, Costs, ModelCosts
from sapwood_router.flow.disaggregation.weighing import Alone, Estimate, cheapest_pair, fit, total
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import PolicyBook

Disaggregate = Literal["auto", "always", "never"]

LEARN_SECONDS = 0.5
"""This long after the last hand-over was begun to measure it, or measured, the next one is taken to cost nothing while too few
were measured; later it is ``PROBE_SECONDS``."""
_ALIKE = 1.03
"""Costs of workers alone that differ by less than this factor are not told apart: the policy chooses among the workers of all
roles, which spreads requests that are all alike more evenly."""
_MOST_WAITING = 0.5
"""The most requests that may wait for their first token, for each that generates, where costs are weighed."""
_MOST_WEIGHED = 32
"""Workers of each role: a decision on a thousand would take 30 ms."""


class Part(enum.Enum):
    """Which part of a request a worker is asked for."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


PREFERRED: dict[Part, tuple[Role, ...]] = {
    Part.WHOLE: (Role.BOTH, Role.DECODE, Role.PREFILL),
    Part.PREFILL: (Role.PREFILL,),
    Part.DECODE: (Role.DECODE, Role.BOTH, Role.PREFILL),
}
"""The roles of workers that are asked for it; each only if no worker of an earlier one can be asked."""


class Decision(msgspec.Struct, frozen=True):
    """Whether a request is disaggregated, and why or why not.

    Attributes:
        disaggregated: Whether.
        reason: Why.
        whole_roles: Who is asked for all of it with ``auto`` if it is not, in this order; empty: anybody.
        estimates: The weighed costs, if any.
    """

    disaggregated: bool
    reason: str
    whole_roles: tuple[Role, ...] = ()
    estimates: tuple[Estimate, ...] = ()


class Disaggregation:
    """Decides for requests, and for callers that only ask what would be decided.

    Args:
        mode: What the operator wants.
        registry: Knows the workers.
        policies: Know what workers hold of a prompt.
        costs: Measured so far.
        rng: Draws, in large fleets.
    """

    def __init__(
        self,
        mode: Disaggregate,
        registry: Registry,
        policies: PolicyBook,
        costs: Costs,
        rng: random.Random | None = None,
    ) -> None:
        self.mode = mode
        self._rng = rng or random.Random()
        self._registry = registry
        self._policies = policies
        self._costs = costs

    def costs_of(self, model: str) -> ModelCosts | None:
        """Where to note a request's times; None: they are not needed."""
        return self._costs.of(model) if self.mode == "auto" and self._registry.has_roles(model) else None

    def concerns(self, model: str) -> bool:
        """Whether requests to a model may be disaggregated, or its workers be preferred by their roles, at all."""
        return self.mode != "never" and self._registry.has_roles(model)

    def roles_for(self, part: Part, decision: Decision | None = None) -> tuple[Role, ...]:
        """The roles of workers that are asked for a part of a request, in this order; empty: any."""
        if self.mode == "never":
            return ()
        return decision.whole_roles if decision and self.mode == "auto" and part is Part.WHOLE else PREFERRED[part]

    def pages_beside(self, demand: Demand) -> frozenset[bytes]:
        """The page fingerprints of the available decode workers: a prefill worker's must equal one of them. Empty: any fit."""
        decoding = [model for _, model in self._askable(demand) if model.role is Role.DECODE]
        pages = frozenset(each.pages for each in decoding)
        return frozenset() if b"" in pages else pages

    def _askable(self, demand: Demand) -> Iterator[tuple[Worker, ServedModel]]:
        """The workers that can be asked for a request, and what they serve."""
        for worker in self._registry.available(demand.model):
            if worker.model is not None and worker.address not in demand.refused_by and worker.breaker.admits():
                yield worker, worker.model

    def decide(self, demand: Demand, prompt: PromptPages, max_tokens: int, *, probe: bool = True) -> Decision:
        """Decides on a request.

        Args:
            demand: What it asks of a worker.
            prompt: Its prompt, with what was generated before.
            max_tokens: The most that are still to be generated.
            probe: Whether the choice is really carried out, so that it may be used for a new measurement.
        """
        if self.mode == "never":
            return Decision(False, "the router does not")
        page_sizes: dict[Role, int] = {}
        pages: dict[Role, set[bytes]] = {Role.PREFILL: set(), Role.DECODE: set(), Role.BOTH: set()}
        waiting = generating = 0
        for worker, model in self._askable(demand):
            waiting += worker.in_flight - worker.embedding - worker.generating
            generating += worker.generating
            page_sizes[model.role] = model.page_size
            pages[model.role].add(model.pages)
        for role in (Role.PREFILL, Role.DECODE):
            if role not in page_sizes:
                return Decision(False, f"no {role.value} worker can be asked")
        if not fit(pages[Role.PREFILL], pages[Role.DECODE]):
            return Decision(False, "no prefill worker's pages fit those of a decode worker")
        if len(prompt.token_ids) < page_sizes[Role.PREFILL]:
            return Decision(False, "the prompt fills no page")
        if max_tokens <= 1:
            return Decision(False, "nothing is generated after the first token")
        if self.mode == "always":
            return Decision(True, "there are prefill and decode workers")
        costs = self._costs.of(demand.model)
        due = costs.handover_age > (PROBE_SECONDS if costs.measured else LEARN_SECONDS)
        if not costs.known_alone or not (costs.measured or due):
            return Decision(False, "costs are not measured yet")
        if waiting > _MOST_WAITING * generating:
            return Decision(False, "requests wait for their first token beside few that generate")
        if not any(worker.view().requests for worker, _ in self._askable(demand)):
            return Decision(False, "no worker has any other request")
        decision = self._weigh(demand, prompt, max_tokens, costs, free=due)
        if due and decision.disaggregated and probe:
            costs.probing()
        return decision

    def _weigh(
        self, demand: Demand, prompt: PromptPages, max_tokens: int, costs: ModelCosts, *, free: bool
    ) -> Decision:
        """Compares the cheapest pair with the cheapest worker of each role that would do it alone.

        Args:
            free: Whether a hand-over is taken to cost nothing.
        """
        able = {role: self._able(role, demand) for role in Role}
        alone = Alone(self._policies.of(demand.model), costs, prompt, costs.output_tokens(max_tokens))
        estimates = alone.of_each(able)
        cheapest = {role: min((each.estimate for each in those), key=total) for role, those in estimates.items()}
        ways = list(cheapest.values())
        pair = cheapest_pair(estimates, costs, free=free)
        if pair is not None:
            ways.append(pair)
        if not ways:
            return Decision(False, "no worker can be asked now")
        least = min(ways, key=total)
        if least.decode_worker:
            reason = "a pair costs least" + ", if a hand-over costs nothing: one is due, to measure that" * free
            return Decision(True, reason, estimates=tuple(ways))
        if max(each.total for each in cheapest.values()) < _ALIKE * least.total:
            return Decision(False, "any worker alone costs less", (), tuple(ways))
        others = (role for role in PREFERRED[Part.WHOLE] if role is not least.role)
        return Decision(False, f"a {least.role.value} worker alone costs less", (least.role, *others), tuple(ways))

    def _able(self, role: Role, demand: Demand) -> list[Worker]:
        """The workers of a role that can take the request now; of many, some that are drawn."""
        of_role = [each for each in self._registry.available(demand.model) if each.model and each.model.role is role]
        if len(of_role) > _MOST_WEIGHED:
            of_role = self._rng.sample(of_role, _MOST_WEIGHED)
        try:
            return eligible(of_role, demand).workers
        except (InvalidArgumentError, UnavailableError):
            return []
