"""API keys on the router's ports, with the openai client and over gRPC, and the operators' port."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from sapwood.client import ResourceExhaustedError, SapwoodError, UnauthenticatedError
from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_common.tenants.api_keys import parse_keys
from sapwood_common.tenants.tenant import TargetRange


def make_key(name: str, file: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "sapwood.cli.main", "key", name, "--file", str(file), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_only_who_has_a_key_is_served(start_services, connect, keys: Path) -> None:
    alice = make_key("alice", keys)
    cluster = start_services("--log-level", "debug", router=("--api-keys", str(keys)))
    cluster.wait_ready()
    for wrong in (None, "sk-sapwood-wrong", alice[:-1]):
        with pytest.raises(UnauthenticatedError):
            connect(cluster.grpc, api_key=wrong).list_models()
        with pytest.raises(UnauthenticatedError):
            connect(cluster.grpc, api_key=wrong).generate("hello", max_tokens=1).text()
    assert connect(cluster.grpc, api_key=alice).generate("hello", max_tokens=2, ignore_eos=True).text() is not None

    web = httpx.Client(timeout=60, trust_env=False)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", http_client=web).models.list()
    client = openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key=alice, http_client=web)
    assert client.completions.create(model="fake", prompt="hello", max_tokens=3).usage.completion_tokens >= 1
    assert web.get(f"http://{cluster.http}/health").status_code == 200
    assert web.get(f"http://{cluster.http}/metrics").status_code == 200

    # A key that is added is known within a second or so, and the file holds none.
    bob = make_key("bob", keys)
    deadline = time.monotonic() + 60
    while True:
        try:
            connect(cluster.grpc, api_key=bob).list_models()
            break
        except UnauthenticatedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert alice not in keys.read_text()
    assert bob not in keys.read_text()
    assert keys.stat().st_mode & 0o077 == 0
    cluster.stop()
    logs = "\n".join(line for process in cluster.processes.values() for line in process.lines)
    assert "Generate ends UNAUTHENTICATED" in logs
    assert not any(secret in logs for secret in (alice, bob, alice[:-1]))


def test_a_key_is_made_with_an_objective(keys: Path) -> None:
    make_key("alice", keys, "--objective", "ttft-ms=200-2000", "tpot-ms=50", "--operator")
    [entry] = parse_keys(keys)
    settings = entry.settings
    assert (settings.first_token, settings.each_token) == (TargetRange(200, 2000), TargetRange(50, 50))
    assert settings.operator


def test_a_keys_rate_ends_in_a_retry_delay(start_router, connect, keys: Path) -> None:
    slow, free = make_key("slow", keys, "--per-minute", "12"), make_key("free", keys)
    cluster = start_router("--api-keys", str(keys))
    cluster.wait_ready()
    client = connect(cluster.grpc, api_key=slow)
    with pytest.raises(ResourceExhaustedError) as refused:
        for _ in range(1000):
            client.list_models()
    assert refused.value.retry_after is not None
    assert 0 < refused.value.retry_after <= 5
    connect(cluster.grpc, api_key=free).list_models()
    # A client's key is none to the router itself.
    with pytest.raises(SapwoodError, match=r"UNIMPLEMENTED.*--admin-port"):
        connect(cluster.grpc, api_key=free).list_workers()


def test_operators_methods_have_their_own_port(start_router, connect) -> None:
    cluster = start_router("--admin-port", "0")
    cluster.wait_ready()
    with pytest.raises(SapwoodError, match="admin-port"):
        connect(cluster.grpc).list_workers()
    admin = cluster.processes["router"].find(r"admin listening on ([\d.]+:\d+)")
    assert [worker.address for worker in connect(admin).list_workers()] == [cluster.worker]
    assert connect(cluster.grpc).list_models()


def test_a_request_that_is_too_large_is_refused(start_router) -> None:
    cluster = start_router("--max-body-bytes", "2000")
    cluster.wait_ready()
    with grpc.insecure_channel(cluster.grpc) as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(router_pb2.RouterGenerateRequest(text="x" * 3000))
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    answer = httpx.post(f"http://{cluster.http}/v1/completions", content=b"x" * 3000, timeout=60, trust_env=False)
    assert answer.status_code == 413
