"""Which worker had better have another role, by what its kind and the other have had to do lately.

If prompts wait long and decode workers have room, a decode worker should become a prefill worker, and the other way round. It is
said where operators look, and nothing is changed: ``sapwood worker role`` does that.

Averages forget half of what they know in ``SMOOTHING`` seconds, so that a burst proposes nothing; a kind's last worker keeps
its role.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sapwood_router.fleet.registry import Registry
from sapwood_router.fleet.served_model import Role
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.disaggregation.costs import Costs

logger = logging.getLogger(__name__)

SMOOTHING = 30.0
_LONG_WAIT, _SHORT_WAIT = 1.0, 0.1
"""Seconds of prompts queued for each prefill worker: from the first it has too much to do, up to the second next to nothing."""
_FULL, _ROOMY = 0.9, 0.5
"""The share of a decode worker's pages that running requests hold, averaged in the same way."""


class _Averages(NamedTuple):
    """Means over workers: seconds of prompts that wait for prefill; for decode the share of pages held, and who waits."""

    wait: float = 0.0
    held: float = 0.0
    waiting: float = 0.0


class RoleProposals:
    """Writes ``proposed`` of the workers.

    Args:
        registry: Knows the workers.
        costs: Measured so far.
        clock: Seconds, monotonic.
    """

    def __init__(self, registry: Registry, costs: Costs, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._costs = costs
        self._clock = clock
        self._averages: dict[str, _Averages] = {}
        self._looked = clock()

    def look(self) -> None:
        """Takes the load as it is now into account; to be called about once a second."""
        now = self._clock()
        kept = 0.5 ** ((now - self._looked) / SMOOTHING)
        self._looked = now
        models = {worker.model.model for worker in self._registry.all() if worker.model is not None}
        self._averages = {model: each for model, each in self._averages.items() if model in models}
        proposed: dict[Worker, tuple[Role, str]] = {}
        for model in models:
            if self._registry.has_roles(model) and (found := self._proposal(model, kept)) is not None:
                proposed[found[0]] = found[1:]
        for worker in self._registry.all():
            proposal = proposed.get(worker)
            if proposal is not None and (worker.proposed is None or worker.proposed[0] is not proposal[0]):
                role, why = proposal
                logger.info("%s had better be for %s: %s", worker.address, role.value, why)
            worker.proposed = proposal

    def _proposal(self, model: str, kept: float) -> tuple[Worker, Role, str] | None:
        workers = self._registry.available(model)
        prefill, decode = _of(workers, Role.PREFILL), _of(workers, Role.DECODE)
        if not prefill or not decode:
            return None
        costs = self._costs.of(model)
        views = {worker: worker.view() for worker in (*prefill, *decode)}
        now = _Averages(
            sum(costs.prefill(views[each].queued_tokens) for each in prefill) / len(prefill),
            sum(views[each].used_share for each in decode) / len(decode),
            sum(each.load.waiting_requests for each in decode) / len(decode),
        )
        before = self._averages.get(model, _Averages())
        average = self._averages[model] = _Averages(
            *(old * kept + new * (1 - kept) for old, new in zip(before, now, strict=True))
        )
        if average.wait > _LONG_WAIT and average.held < _ROOMY and average.waiting < 1 and len(decode) > 1:
            least = min(decode, key=lambda each: views[each].requests)
            return least, Role.PREFILL, f"prompts wait {average.wait:.1f} s for each prefill worker"
        if (average.held > _FULL or average.waiting >= 1) and average.wait < _SHORT_WAIT and len(prefill) > 1:
            least = min(prefill, key=lambda each: views[each].queued_tokens)
            why = f"decode workers are {average.held:.0%} full and {average.waiting:.1f} requests wait for each"
            return least, Role.DECODE, why
        return None


async def follow_proposals(proposals: RoleProposals) -> None:
    """Looks once a second, for ever."""
    while True:
        await asyncio.sleep(1.0)
        proposals.look()


def _of(workers: Sequence[Worker], role: Role) -> list[Worker]:
    return [worker for worker in workers if worker.model is not None and worker.model.role is role]
