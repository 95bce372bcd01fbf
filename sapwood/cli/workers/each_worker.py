"""Calls each of several workers, for the verbs about workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from sapwood.cli.request import failing_plainly
from sapwood_common.settings.flags import add_option

if TYPE_CHECKING:  # at run time grpc is loaded only by the verbs that use it
    from sapwood.v1 import worker_pb2_grpc

Answer = TypeVar("Answer")


def add_worker_option(parser: Any) -> None:
    """Adds ``--worker``, whose value :func:`each_worker` takes."""
    add_option(
        parser,
        "--worker",
        "The worker's gRPC host:port; several are separated by commas.",
        variable="SAPWOOD_WORKERS",
        default="127.0.0.1:50061",
        metavar="ADDRESS",
    )


def each_worker(addresses: str, call: Callable[[worker_pb2_grpc.WorkerStub], Answer]) -> Iterator[tuple[str, Answer]]:
    """Makes the call to one worker after the other; gives each one's address and answer as it comes.

    Args:
        addresses: ``host:port``, several separated by commas.
        call: Makes the call; must not use the stub after it returns.

    Raises:
        CliError: A worker refuses, or cannot be reached; those after it are not called.
    """
    import grpc

    from sapwood.v1 import worker_pb2_grpc

    for address in addresses.split(","):
        with failing_plainly(address, "worker"), grpc.insecure_channel(address) as channel:
            answer = call(worker_pb2_grpc.WorkerStub(channel))
        yield address, answer
