"""`sapwood up` with the services' own flags: a cluster of real processes on a tiny model of random weights."""

from __future__ import annotations

import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc


def test_flags_reach_the_services_and_tls_and_keys_do_not_keep_it_from_starting(
    start_cluster: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_key = [sys.executable, "-m", "sapwood.cli.main", "key", "alice", "--file", str(keys)]
    key = subprocess.run(make_key, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    flags = ["--workers", 1, "--threads", 1, "--policy", "least_load"]
    flags += ["--router-tls-cert", tmp_path / "cert.pem", "--router-tls-key", tmp_path / "key.pem"]
    flags += ["--router-api-keys", keys, "--router-admin-port", 0, "--router-log-format", "json"]
    flags += ["--worker-max-running", 7, "--worker-num-pages", 32]
    flags += ["--worker-health-port", 0, "--worker-served-model-name", "tiny", "--no-worker-structured-output"]
    flags += ["--tokenizer-served-model-name", "tiny", "--tokenizer-max-text-bytes", 100]
    with start_cluster(*map(str, flags)) as cluster:
        for address in cluster.workers:
            with grpc.insecure_channel(address) as channel:
                info = worker_pb2_grpc.WorkerStub(channel).GetModelInfo(worker_pb2.GetModelInfoRequest(), timeout=60)
            assert (info.model, info.max_running, info.num_pages) == ("tiny", 7, 32)
        ca = authority.cert_pem.bytes()
        secure = grpc.ssl_channel_credentials(ca)
        with grpc.secure_channel(cluster.grpc, secure) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            asked = router_pb2.RouterGenerateRequest(text="hi", sampling=common_pb2.SamplingParams(max_tokens=3))
            with pytest.raises(grpc.RpcError) as caught:
                list(router.Generate(asked, timeout=60))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            bearer = (("authorization", f"Bearer {key}"),)
            assert list(router.Generate(asked, metadata=bearer, timeout=60))[-1].usage.prompt_tokens == 2
            asked.text = "x" * 101
            with pytest.raises(grpc.RpcError) as caught:
                list(router.Generate(asked, metadata=bearer, timeout=60))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.RpcError) as caught:
                router.GetStatus(router_pb2.GetStatusRequest(), metadata=bearer, timeout=60)
            assert "(--router-admin-port of `sapwood up`)" in caught.value.details()
        admin = cluster.wait_for_line(r"admin listening on").rpartition("listening on ")[2].partition('"')[0]
        with grpc.secure_channel(admin, secure) as channel:
            status = router_pb2_grpc.RouterStub(channel).GetStatus(router_pb2.GetStatusRequest(), timeout=60)
        assert status.policy == "least_load"
        assert {worker.address for worker in status.workers if worker.healthy} == set(cluster.workers)
        context = ssl.create_default_context(cadata=ca.decode())
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(f"https://{cluster.http}/health", timeout=60) as answer:
            assert answer.status == 200


def test_a_setting_that_a_service_refuses_is_named_as_it_was_given(start_cluster: Any) -> None:
    with (
        pytest.raises(pytest.fail.Exception) as caught,
        start_cluster("--workers", "1", "--tokenizer-chat-template", "/nowhere.jinja"),
    ):
        pass
    assert "--tokenizer-chat-template: cannot read /nowhere.jinja" in str(caught.value)
