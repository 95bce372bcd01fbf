"""The standard health check, as a question with a yes or a reason for no."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

NOT_SERVING = "it says that it is not serving"
"""What is wrong with a service that answers, but takes nothing new: it starts, or drains."""

_CHECK_TIMEOUT = 2.0


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> str | None:
    """One standard health check: None if the service serves, else what is wrong.

    Raises:
        TimeoutError: No answer in time.
    """
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_CHECK_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError from error
        return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return NOT_SERVING
