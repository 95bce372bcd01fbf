"""The compose file with all that a careful operator adds to it: TLS, API keys, a Mooncake Store."""

from __future__ import annotations

import os
import ssl

import grpc
import httpx
import pytest
import trustme

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.tenants.api_keys import hash_key, make_key

SERVICES = ("tokenizer", "worker-0", "worker-1", "router")

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_with_tls_keys_and_mooncake_a_prefix_outlives_the_workers(engine, stack, traces, wait_until, tmp_path) -> None:
    key = make_key()
    (tmp_path / "keys").write_text(f"alice {hash_key(key)}\n")
    authority = trustme.CA()
    for service, name in (("router", "127.0.0.1"), ("tokenizer", "tokenizer"), ("worker", "worker")):
        (tmp_path / service).mkdir()
        made = authority.issue_cert(name)
        authority.cert_pem.write_to_path(tmp_path / service / "ca.crt")
        made.cert_chain_pems[0].write_to_path(tmp_path / service / "tls.crt")
        made.private_key_pem.write_to_path(tmp_path / service / "tls.key")
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    variables = {
        "COMPOSE_FILE": "compose.yaml:docker/compose.tls.yaml:docker/compose.keys.yaml",
        "COMPOSE_PROFILES": "mooncake",
        "SAPWOOD_TLS": str(tmp_path),
        "SAPWOOD_API_KEYS": str(tmp_path / "keys"),
        "SAPWOOD_TAG": "mooncake",
        "SAPWOOD_WORKER_EXTRAS": "mooncake",
        "SAPWOOD_HOST_CACHE_GB": "0.25",
        "SAPWOOD_STORAGE": "mooncake://mooncake-master:50051?metadata=http://mooncake-master:8080/metadata",
        "SAPWOOD_MOONCAKE_SIZE": "256 MB",
    }
    engine.compose("build", **variables)
    stack.up(**variables)
    trusted = ssl.create_default_context(cafile=tmp_path / "router/ca.crt")
    web = httpx.Client(trust_env=False, timeout=300, verify=trusted, base_url=f"https://{stack.http}/v1")
    credentials = grpc.ssl_channel_credentials(
        *((tmp_path / "router" / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    )
    prompt = "The quick brown fox jumps over the lazy dog. " * 20

    def ask(traceparent: str) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        headers = {"authorization": f"Bearer {key}", "traceparent": traceparent}
        answer = web.post("/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stored() -> bool:
        return any(tier.bytes_in for service in ("worker-0", "worker-1") for tier in tiers(service))

    def tiers(service: str) -> list:
        named = (("grpc.ssl_target_name_override", "worker"),)
        with grpc.secure_channel(f"{engine.address(service)}:50061", credentials, named) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            found = stub.GetCacheStats(worker_pb2.GetCacheStatsRequest(), timeout=60).tiers
        return [tier for tier in found if tier.tier == worker_pb2.CACHE_TIER_STORAGE]

    assert web.get("/models").status_code == 401
    operator = ("sapwood", "router", "workers", "list", "--address", "127.0.0.1:50055", "--ca", "/tls/ca.crt")
    assert "worker-0:50061" in engine.compose("exec", "-T", "router", *operator, **variables)
    assert ask(f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-00") == 0
    wait_until(stored, lambda: f"{[tiers(service) for service in ('worker-0', 'worker-1')]}")
    engine.compose("restart", "worker-0", "worker-1", **variables)
    stack.wait_healthy(*SERVICES)
    trace_id = os.urandom(16).hex()
    spans = traces.keep(trace_id)
    assert ask(f"00-{trace_id}-{os.urandom(8).hex()}-01") >= 128
    wait_until(
        lambda: {"storage", "host"} <= {item.value.string_value for item in loads(spans())},
        lambda: f"spans: {[(name, span.name) for name, span in spans()]}",
        120,
    )


def loads(spans: list) -> list:
    return [item for _, span in spans if span.name == "cache load" for item in span.attributes]
