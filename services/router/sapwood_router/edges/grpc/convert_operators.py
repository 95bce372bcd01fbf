"""Operators' requests to a router, as messages: its state, and explanations of its choices."""

from __future__ import annotations

from dataclasses import asdict

from sapwood.v1 import router_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.grpc.convert import to_load
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.adapters import AdapterState
from sapwood_router.flow.explain import Explanation
from sapwood_router.flow.steering import PauseMode
from sapwood_router.observe.status import RouterState, WorkerState

_ROLE = {
    "both": worker_pb2.WORKER_ROLE_BOTH,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}

_PAUSE = {
    router_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.ABORT,
    router_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    router_pb2.PAUSE_MODE_IN_PLACE: PauseMode.IN_PLACE,
    router_pb2.PAUSE_MODE_RETRACT: PauseMode.RETRACT,
}


def to_pause_mode(mode: router_pb2.PauseMode) -> PauseMode:
    """What becomes of requests that run. Raises InvalidArgumentError if there is no such mode."""
    if (found := _PAUSE.get(mode)) is None:
        raise InvalidArgumentError(f"there is no mode {mode}", field="mode")
    return found


def to_status(state: RouterState, workers: WorkerNames) -> router_pb2.GetStatusResponse:
    """A snapshot as a message."""
    return router_pb2.GetStatusResponse(
        uptime_seconds=state.uptime,
        running_requests=state.running,
        queued_requests=state.queued,
        resumptions=state.resumptions,
        problem=state.problem,
        policy=state.policy,
        workers=[to_worker_status(each, workers) for each in state.workers],
    )


def to_worker_status(worker: WorkerState, workers: WorkerNames) -> router_pb2.WorkerStatus:
    """A worker's part of a snapshot as a message."""
    return router_pb2.WorkerStatus(
        address=worker.address,
        healthy=worker.state != "down",
        model=worker.model,
        in_flight=worker.in_flight,
        load=to_load(worker.load),
        problem=worker.problem,
        draining=worker.draining,
        breaker=worker.breaker,
        epoch=worker.epoch,
        tokens_per_second=worker.tokens_per_second,
        role=_ROLE[worker.role],
        proposed_role=_ROLE.get(worker.proposed_role, worker_pb2.WORKER_ROLE_UNSPECIFIED),
        proposed_because=worker.proposed_because,
        id=workers.id_of(worker.address),
    )


def to_fleet_lora(state: AdapterState) -> router_pb2.FleetLora:
    """An adapter and its places as a message."""
    return router_pb2.FleetLora(**asdict(state))


def to_explanation(explanation: Explanation) -> router_pb2.ExplainRouteResponse:
    """A choice of workers and the facts behind it, as a message."""
    response = router_pb2.ExplainRouteResponse(
        chosen=explanation.chosen,
        reason=explanation.reason,
        prompt_tokens=explanation.prompt_tokens,
        policy=explanation.policy,
        disaggregated=explanation.decision.disaggregated,
        disaggregation=explanation.decision.reason,
        decode_chosen=explanation.decode_chosen,
    )
    for name, choice in explanation.shadows.items():
        response.shadows.add(policy=name, chosen=choice.address, reason=choice.reason)
    for estimate in explanation.decision.estimates:
        response.estimates.add(
            worker=estimate.worker,
            decode_worker=estimate.decode_worker,
            prefill_seconds=estimate.prefill,
            transfer_seconds=estimate.transfer,
            generate_seconds=estimate.generate,
            others_seconds=estimate.delay + estimate.crowding,
        )
    for candidate in explanation.candidates:
        fields = asdict(candidate)
        del fields["parts"]  # for the page
        response.candidates.add(**fields)
    return response
