"""One request, traced over every service, seen by an OTLP receiver in the test."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the service it is of."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []
        self._changed = threading.Condition()

    def Export(self, request, context):  # noqa: N802
        with self._changed:
            for resource in request.resource_spans:
                names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                for scope in resource.scope_spans:
                    self.spans += [(names[0], span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, condition: Callable[[list], bool]) -> list:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), timeout=60), [
                (name, span.name) for name, span in self.spans
            ]
            return list(self.spans)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = grpc.server(ThreadPoolExecutor(4))
    found = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found
    server.stop(0)


WANTED = {
    ("sapwood-router", "generate"),
    *(
        ("sapwood-router", stage)
        for stage in ("prepare", "select", "acquire", "build", "dispatch", "execute", "respond")
    ),
    ("sapwood-tokenizer", "sapwood.v1.Tokenizer/Tokenize"),
    ("sapwood-worker", "worker generate"),
    ("sapwood-worker", "queue"),
    ("sapwood-worker", "prefill"),
    ("sapwood-worker", "decode"),
}


def post(url: str, body: bytes, **headers: str) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        return response.read()


def test_one_request_is_one_connected_trace_over_all_services(start_services, connect, receiver: Receiver) -> None:
    cluster = start_services("--trace-endpoint", f"127.0.0.1:{receiver.port}")
    cluster.wait_ready()
    trace_id, parent = "5b" * 16, "c7" * 8
    post(
        f"http://{cluster.http}/v1/completions",
        b'{"model": "fake", "prompt": "hello there", "max_tokens": 5}',
        traceparent=f"00-{trace_id}-{parent}-01",
    )
    spans = receiver.wait_for(lambda spans: {(name, span.name) for name, span in spans} >= WANTED)
    assert {span.trace_id.hex() for _, span in spans} == {trace_id}
    known = {span.span_id.hex() for _, span in spans} | {parent}
    assert all(span.parent_span_id.hex() in known for _, span in spans)
    by_name = {span.name: span for _, span in spans}
    attributes = {item.key: item.value for item in by_name["generate"].attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["gen_ai.request.max_tokens"].int_value == 5
    assert attributes["gen_ai.response.model"].string_value == "fake"
    queue, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    assert queue.start_time_unix_nano <= queue.end_time_unix_nano <= prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano <= decode.end_time_unix_nano


def test_over_grpc_a_trace_begins_at_the_router_and_polling_makes_none(
    start_services, connect, receiver: Receiver
) -> None:
    cluster = start_services("--trace-endpoint", f"127.0.0.1:{receiver.port}")
    cluster.wait_ready()
    client = connect(cluster.grpc)
    client.list_workers()
    assert client.generate("hello", max_tokens=3, ignore_eos=True).text()
    spans = receiver.wait_for(lambda spans: {(name, span.name) for name, span in spans} >= WANTED)
    assert len({span.trace_id for _, span in spans}) == 1
    (root,) = [span for _, span in spans if not span.parent_span_id]
    assert root.name == "sapwood.v1.Router/Generate"
    # A caller that traces is the root: the client hands its span's context on.
    with TracerProvider().get_tracer("caller").start_as_current_span("ask") as asked:
        assert client.generate("hello", max_tokens=3, ignore_eos=True).text()
    context = asked.get_span_context()
    trace, root_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    spans = receiver.wait_for(
        lambda spans: {(name, span.name) for name, span in spans if span.trace_id == trace} >= WANTED
    )
    parents = {span.parent_span_id: span.name for _, span in spans if span.trace_id == trace}
    assert parents[root_id] == "sapwood.v1.Router/Generate"


def test_what_is_not_sampled_is_not_sent(start_services, connect, receiver: Receiver) -> None:
    cluster = start_services("--trace-endpoint", f"127.0.0.1:{receiver.port}", "--trace-ratio", "0")
    cluster.wait_ready()
    assert connect(cluster.grpc).generate("hello", max_tokens=3).text()
    # The caller's decision stands, whatever the ratio.
    body = b'{"model": "fake", "prompt": "hello there", "max_tokens": 5}'
    post(f"http://{cluster.http}/v1/completions", body, traceparent=f"00-{'5c' * 16}-{'c7' * 8}-01")
    spans = receiver.wait_for(lambda spans: {(name, span.name) for name, span in spans} >= WANTED)
    assert {span.trace_id.hex() for _, span in spans} == {"5c" * 16}
