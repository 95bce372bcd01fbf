"""An explanation names the worker that the request would get."""

from __future__ import annotations

import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import SapwoodError
from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome
from sapwood_router.fleet.eligibility import Demand
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import Costs
from sapwood_router.flow.disaggregation.decision import Disaggregation, Part
from sapwood_router.flow.explain import explain
from sapwood_router.flow.select import Selector
from sapwood_router.request.caller import Caller
from sapwood_router.request.context import FieldNames, RequestContext, TokenPrompt
from sapwood_router.request.output import OutputOptions
from sapwood_router.routing.factory import PolicyParts, make_policy, policy_names
from sapwood_router.routing.index.blocks import BlockIndex, Tier
from sapwood_router.routing.policies.base import PromptPages
from sapwood_router.routing.policy_book import PolicyBook
from sapwood_testing.clock import Clock

PAGE = 16
MODES = ("auto", "always", "never")


class Fleet:
    """A fleet whose state and draws depend on its arguments alone: two of the same arguments are twins."""

    def __init__(self, seed: int, workers: int, policy: str, mode: str, roles: bool, shadows: bool) -> None:
        chance, clock = random.Random(seed), Clock()
        self.prompt = [chance.randrange(1000) for _ in range(chance.choice((3, 40, 400)))]
        self.registry = Registry((), most_requests=lambda _: 6)
        blocks = BlockIndex(1 << 24)
        for number in range(workers):
            worker = Worker(f"w{number}", CircuitBreaker(BreakerSettings(consecutive=1), clock), clock)
            self.registry.add(worker)
            role = chance.choice(tuple(Role)) if roles else Role.BOTH
            pages = chance.choice((b"", b"a", b"b")) if roles else b""
            context = chance.choice((100, 1000))
            self.registry.mark_up(worker, ServedModel("m", context, 1000, PAGE, 100, 1, 4, role=role, pages=pages))
            blocks.reset(worker.address)
            if chance.random() < 0.3:
                held = PromptPages(self.prompt[: chance.randrange(len(self.prompt) + 1)])
                blocks.store(worker.address, Tier.GPU, held.hashes(PAGE))
            for _ in range(chance.choice((0, 0, 1, 3, 6))):
                worker.lease(chance.randrange(200))
            if chance.random() < 0.1:
                worker.breaker.begin().end(Outcome.SERVER_FAULT)
            if chance.random() < 0.1:
                self.registry.set_draining(worker, True)
        draws = random.Random(seed + 1)
        names = ("round_robin", "power_of_two") if shadows else ()
        self.policies = PolicyBook(
            policy,
            {},
            names,
            lambda name: make_policy(name, PolicyParts(1 << 24, draws, clock, blocks)),
            lambda *_: None,
        )
        costs = Costs(clock)
        if roles and (known := costs.of("m")):
            for tokens in (100, 200, 400) * 3:
                known.prefilled(tokens, tokens * 1e-3)
                known.handed_over(tokens, tokens * 1e-5)
            for requests in (1, 10):
                known.generated(100, 1.0, requests, 0.0)
        self.deciding = Disaggregation(mode, self.registry, self.policies, costs, draws)
        self.session = SimpleNamespace(worker=f"w{chance.randrange(workers)}") if chance.random() < 0.3 else None

    def chosen(self) -> tuple[str, str, str]:
        """Who would get the request, why, and who would generate."""
        at = "" if self.session is None else self.session.worker
        prompt, demand = PromptPages(self.prompt, "chat"), Demand("m", len(self.prompt), "prompt")
        selector = Selector(self.registry, self.policies, self.deciding)
        route = selector.begin(demand, prompt, 50, at)
        decode = ""
        if route.part is Part.PREFILL:
            assert route.worker.model is not None
            try:
                decode = selector.decode(demand, prompt, route.worker.model.pages, at).worker.address
            except SapwoodError:
                decode = ""
        return route.choice.address, route.choice.reason, decode

    def explained(self) -> tuple[str, str, str]:
        """The same as it is explained; every worker is there once, and the chosen one is not excluded."""
        context = RequestContext(
            request_id="r",
            worker_request_id="r.1",
            prompt=TokenPrompt(self.prompt),
            sampling=SamplingParams(max_tokens=50),
            output=OutputOptions(),
            fields=FieldNames(prompt="tokens"),
            deadline=1e9,
            token_ids=self.prompt,
        )
        context.caller, context.session = Caller(session="chat"), self.session
        found = explain(context, self.registry, self.policies, self.deciding)
        assert [each.address for each in found.candidates] == [worker.address for worker in self.registry.all()]
        assert [each.excluded for each in found.candidates if each.address == found.chosen] == [""]
        return found.chosen, found.reason, found.decode_chosen


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    workers=st.integers(1, 8) | st.sampled_from((64, 65, 120, 300)),
    policy=st.sampled_from(policy_names()),
    mode=st.sampled_from(MODES),
    roles=st.booleans(),
    shadows=st.booleans(),
)
def test_an_explanation_names_the_worker_that_is_chosen(
    seed: int, workers: int, policy: str, mode: str, roles: bool, shadows: bool
) -> None:
    twins = [Fleet(seed, workers, policy, mode, roles, shadows) for _ in range(2)]
    try:
        chosen = twins[0].chosen()
    except SapwoodError as error:
        try:
            explained = twins[1].explained()
        except SapwoodError as same:
            assert (type(same), same.message) == (type(error), error.message)
            return
        raise AssertionError(f"{explained} is explained where nobody is chosen: {error}") from error
    assert twins[1].explained() == chosen
