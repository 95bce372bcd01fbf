"""One request, traced over every service, seen by an OTLP receiver in the test."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.parser import text_string_to_metric_families

from sapwood.client import SapwoodError
from sapwood.v1 import worker_pb2, worker_pb2_grpc


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
    ("sapwood-router", "text_completion fake"),
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
        b'{"model": "", "prompt": "hello there", "max_tokens": 5}',  # the only one: its name is known later
        traceparent=f"00-{trace_id}-{parent}-01",
    )
    spans = receiver.wait_for(lambda spans: {(name, span.name) for name, span in spans} >= WANTED)
    assert {span.trace_id.hex() for _, span in spans} == {trace_id}
    known = {span.span_id.hex() for _, span in spans} | {parent}
    assert all(span.parent_span_id.hex() in known for _, span in spans)
    by_name = {span.name: span for _, span in spans}
    assert by_name["text_completion fake"].kind == Span.SPAN_KIND_CLIENT
    attributes = {item.key: item.value for item in by_name["text_completion fake"].attributes}
    assert attributes["gen_ai.operation.name"].string_value == "text_completion"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert attributes["gen_ai.request.max_tokens"].int_value == 5
    assert attributes["gen_ai.response.model"].string_value == "fake"
    queue, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    assert queue.start_time_unix_nano <= queue.end_time_unix_nano <= prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano <= decode.end_time_unix_nano

    # What is refused says why, in the words of its status; embeddings have a trace of their own, over gRPC too.
    client = connect(cluster.grpc)
    for call in (
        lambda: client.generate(token_ids=[1, 2], model="none", max_tokens=1).text(),
        lambda: client.generate(messages=[{"role": "user", "content": "hi"}], model="none", max_tokens=1).text(),
        lambda: client.embed("hello"),
    ):
        with pytest.raises(SapwoodError):
            call()
    wanted = {"text_completion none": "NOT_FOUND", "chat none": "NOT_FOUND", "embeddings": "INVALID_ARGUMENT"}
    spans = receiver.wait_for(lambda spans: {span.name for _, span in spans} >= wanted.keys())
    by_id = {span.span_id: span for _, span in spans}
    for span in (span for _, span in spans if span.name in wanted):
        attributes = {item.key: item.value.string_value for item in span.attributes}
        assert attributes["error.type"] == wanted[span.name]
        assert span.name.split()[0] == attributes["gen_ai.operation.name"]
        receiver.wait_for(lambda _, span=span: any(other.span_id == span.parent_span_id for _, other in receiver.spans))
        by_id |= {other.span_id: other for _, other in receiver.spans}
        assert by_id[span.parent_span_id].name in ("sapwood.v1.Router/Generate", "sapwood.v1.Router/Embed")


@pytest.mark.slow
def test_over_grpc_a_trace_begins_at_the_router_and_polling_makes_none(
    start_services, connect, receiver: Receiver, tmp_path: Path
) -> None:
    tiers = ("--host-cache-ratio", "2", "--storage", f"file://{tmp_path}/store", "--storage-min-tokens", "16")
    cluster = start_services(
        "--trace-endpoint", f"127.0.0.1:{receiver.port}", worker=(*tiers, "--storage-prefetch", "wait_complete")
    )
    cluster.wait_ready()
    client = connect(cluster.grpc)
    client.list_workers()
    assert client.generate("hello", max_tokens=3, ignore_eos=True).text()
    # The root ends last, and may be sent by itself.
    whole = {*WANTED, ("sapwood-router", "sapwood.v1.Router/Generate")}
    spans = receiver.wait_for(lambda spans: {(name, span.name) for name, span in spans} >= whole)
    assert len({span.trace_id for _, span in spans}) == 1
    (root,) = [span for _, span in spans if not span.parent_span_id]
    assert root.name == "sapwood.v1.Router/Generate"
    # A caller that traces is the root: the client hands its span's context on.
    with TracerProvider().get_tracer("caller").start_as_current_span("ask") as asked:
        assert client.generate("hello", max_tokens=3, ignore_eos=True).text()
    context = asked.get_span_context()
    trace, root_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    spans = receiver.wait_for(
        lambda spans: {(name, span.name) for name, span in spans if span.trace_id == trace} >= whole
    )
    parents = {span.parent_span_id: span.name for _, span in spans if span.trace_id == trace}
    assert parents[root_id] == "sapwood.v1.Router/Generate"

    # What comes from lower tiers of the cache has spans, and is counted.
    def counted(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(cluster.metrics("worker"))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        )

    prompt = "a long prompt of several pages, " * 4
    client.generate(prompt, max_tokens=1).text()
    deadline = time.monotonic() + 60
    page = counted("sapwood_worker_store_bytes_total", direction="written")
    while counted("sapwood_worker_store_bytes_total", direction="written") < 8 * 16 * 8:
        assert time.monotonic() < deadline, page
        time.sleep(0.05)
    with grpc.insecure_channel(cluster.worker) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        worker.FlushCache(worker_pb2.FlushCacheRequest())
        worker.ClearCache(worker_pb2.ClearCacheRequest(tiers=[worker_pb2.CACHE_TIER_HOST]))
    client.generate(prompt + "?", max_tokens=1).text()
    loads = receiver.wait_for(lambda spans: sum(span.name == "cache load" for _, span in spans) >= 2)
    found = [item.value.string_value for _, span in loads if span.name == "cache load" for item in span.attributes]
    assert {"storage", "host"} <= set(found)
    assert counted("sapwood_worker_cache_hit_tokens_total", tier="storage") == 128
    assert counted("sapwood_worker_store_bytes_total", direction="read") > 0
    assert counted("sapwood_worker_store_errors_total", error="call") == 0
    assert counted("sapwood_worker_store_timeouts_total") == 0


def test_what_is_not_sampled_is_not_sent(start_services, connect, receiver: Receiver) -> None:
    cluster = start_services("--trace-endpoint", f"127.0.0.1:{receiver.port}", "--trace-ratio", "0")
    cluster.wait_ready()
    assert connect(cluster.grpc).generate("hello", max_tokens=3).text()
    # The caller's decision stands, whatever the ratio.
    body = b'{"model": "fake", "prompt": "hello there", "max_tokens": 5}'
    post(f"http://{cluster.http}/v1/completions", body, traceparent=f"00-{'5c' * 16}-{'c7' * 8}-01")
    spans = receiver.wait_for(lambda spans: {(name, span.name) for name, span in spans} >= WANTED)
    assert {span.trace_id.hex() for _, span in spans} == {"5c" * 16}


def test_drafted_tokens_are_the_same_in_usage_traces_and_metrics(start_services, connect, receiver: Receiver) -> None:
    flags = ("--trace-endpoint", f"127.0.0.1:{receiver.port}")
    cluster = start_services(*flags, worker=("--speculate", "prefix"))
    cluster.wait_ready()
    body = {"model": "fake", "prompt": [5] * 20, "max_tokens": 60, "ignore_eos": True, "seed": 7}
    for _ in range(2):  # the second time the cache knows what comes
        answer = json.loads(post(f"http://{cluster.http}/v1/completions", json.dumps(body).encode()))
    told = answer["usage"]["completion_tokens_details"]
    last = connect(cluster.grpc).generate(token_ids=[5] * 20, max_tokens=60, ignore_eos=True, seed=7).answer()
    assert last.text == answer["choices"][0]["text"]
    usage = last.usage
    assert told["accepted_prediction_tokens"] > 20 < usage.accepted_prediction_tokens
    spans = receiver.wait_for(
        lambda spans: sum(span.name.startswith(("worker generate", "text_completion")) for _, span in spans) >= 6
    )
    wanted = {
        (one["accepted_prediction_tokens"], one["accepted_prediction_tokens"] + one["rejected_prediction_tokens"])
        for one in (
            told,
            {name: getattr(usage, name) for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")},
        )
    }
    for name in ("worker generate", "text_completion fake"):
        found = [{item.key: item.value.int_value for item in span.attributes} for _, span in spans if span.name == name]
        assert {(each["sapwood.accepted_tokens"], each["sapwood.drafted_tokens"]) for each in found} >= wanted, name
    counted = {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(cluster.metrics("worker"))
        for sample in family.samples
        if sample.name == "sapwood_worker_drafted_tokens_total" and sample.labels["drafter"] == "prefix"
    }
    assert counted["accepted"] >= told["accepted_prediction_tokens"] + usage.accepted_prediction_tokens
