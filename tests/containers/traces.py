"""An OTLP receiver for the tests here, which load this file: they share code through conftest.py only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans of the traces it is told to keep. Life cycle: construct, which starts it, :meth:`stop`.

    Args:
        address: host:port that it listens on.
    """

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._kept: dict[bytes, list[tuple[str, Any]]] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(address)
        self._server.start()

    def stop(self) -> None:
        """Closes it."""
        self._server.stop(None)

    def keep(self, trace_id: str) -> Callable[[], list[tuple[str, Any]]]:
        """From now on keeps this trace; the answer gives its spans so far, each with its service's name."""
        spans = self._kept.setdefault(bytes.fromhex(trace_id), [])
        return lambda: list(spans)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The receiving end of OTLP."""
        with self._lock:
            for resource in request.resource_spans:
                (name,) = [
                    item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
                ]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        if span.trace_id in self._kept:
                            self._kept[span.trace_id].append((name, span))
        return trace_service_pb2.ExportTraceServiceResponse()
