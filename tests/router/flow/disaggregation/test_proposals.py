"""Roles are proposed by what workers of each kind had to do for some time, and only where one can be spared."""

from __future__ import annotations

from sapwood_router.fleet.circuit_breaker import BreakerSettings, CircuitBreaker
from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role, ServedModel
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import Costs
from sapwood_router.flow.disaggregation.proposals import SMOOTHING, RoleProposals
from sapwood_router.routing.worker_view import Load


class Fleet:
    """Workers, and who looks at them once a second."""

    def __init__(self, *roles: Role) -> None:
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        registry = Registry([])
        self.workers = []
        for number, role in enumerate(roles):
            worker = Worker(f"{role.value}-{number}", CircuitBreaker(BreakerSettings(), clock), clock)
            registry.add(worker)
            registry.mark_up(worker, ServedModel("m", 1 << 20, 1000, 16, 100, 1, role=role))
            self.workers.append(worker)
        costs = Costs(clock)
        costs.of("m").prefilled(1000, 1.0)
        self._proposals = RoleProposals(registry, costs, clock)

    def pass_time(self, seconds: float) -> dict[str, str]:
        for _ in range(int(seconds)):
            self.now += 1
            self._proposals.look()
        return {worker.address: worker.proposed[0].value for worker in self.workers if worker.proposed is not None}


def test_a_decode_worker_is_to_compute_prompts_where_these_wait_and_it_has_room() -> None:
    fleet = Fleet(Role.PREFILL, Role.DECODE, Role.DECODE)
    waiting = fleet.workers[0].lease(5000)
    fleet.workers[1].lease(1).prefilled()
    assert fleet.pass_time(1) == {}, "a burst"
    assert fleet.pass_time(2 * SMOOTHING) == {"decode-2": "prefill"}
    assert fleet.workers[2].proposed is not None and "prompts wait" in fleet.workers[2].proposed[1]
    waiting.release()
    assert fleet.pass_time(5 * SMOOTHING) == {}


def test_a_prefill_worker_is_to_generate_where_requests_wait_and_no_prompt_does() -> None:
    fleet = Fleet(Role.PREFILL, Role.PREFILL, Role.DECODE)
    fleet.workers[2].report(Load(running_requests=8, waiting_requests=6, used_pages=99, num_pages=100))
    assert fleet.pass_time(2 * SMOOTHING) == {"prefill-0": "decode"}


def test_nothing_is_proposed_where_both_have_much_to_do_or_there_is_one_of_a_kind() -> None:
    full = Load(running_requests=8, waiting_requests=6, used_pages=99, num_pages=100)
    busy = Fleet(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    for worker in busy.workers[:2]:
        worker.lease(5000)
    for worker in busy.workers[2:]:
        worker.report(full)
    assert busy.pass_time(3 * SMOOTHING) == {}
    pair = Fleet(Role.PREFILL, Role.DECODE)
    pair.workers[0].lease(5000)
    assert pair.pass_time(3 * SMOOTHING) == {}
    equal = Fleet(Role.BOTH, Role.BOTH)
    equal.workers[0].lease(5000)
    assert equal.pass_time(3 * SMOOTHING) == {}
