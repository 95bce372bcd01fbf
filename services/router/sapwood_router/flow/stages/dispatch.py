"""Stage 5: the request goes to the worker, with the time it has left and the trace it is part of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sapwood_common.errors import DeadlineExceededError, UnavailableError
from sapwood_common.telemetry.logs import traceparent_var
from sapwood_router.fleet.session import WorkerRequest
from sapwood_router.fleet.worker import Worker
from sapwood_router.flow.stages.execution import Execution


def dispatch(
    request: WorkerRequest, worker: Worker, deadline: float, execution: Execution, more: Sequence[bytes] = ()
) -> None:
    """Sends a request, with ``more`` of it, over the worker's session; ``execution`` takes the answer.

    Raises:
        UnavailableError: The session has ended.
        DeadlineExceededError: The request's time is over.
    """
    timeout = deadline - asyncio.get_running_loop().time()
    if timeout <= 0:
        raise DeadlineExceededError("the deadline passed before a worker was called")
    if worker.session is None:
        raise UnavailableError(f"worker {worker.address} is not connected", retry_after=1.0)
    if (traceparent := traceparent_var.get()) is not None:
        request.traceparent = traceparent
    execution.begin(worker.session.open(request, timeout, execution, more))
