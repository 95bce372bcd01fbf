"""A model that lies elsewhere, served by its name: from a hub and an S3 on this machine, with weights made here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood_testing.models.hub_server import HubServer, Repo
from sapwood_testing.worker.storage.object_store import ObjectStoreServer


@pytest.fixture
def hub_server(dummy_model: Path, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with a tiny Llama of random weights in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "made"
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(dummy_model))
    model.save_pretrained(folder, max_shard_size="40KB")
    repo = Repo()
    tokenizer = {"tokenizer.json": (dummy_model / "tokenizer.json").read_bytes()}
    first = {file.name: file.read_bytes() for file in folder.iterdir()} | tokenizer
    assert sum(name.endswith(".safetensors") for name in first) > 1
    repo.commit(first, ref="v1")
    repo.commit({"config.json": b"no model at all"})
    server = HubServer()
    server.repos["someone/tiny"] = repo
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_a_model_of_the_hub_is_served_by_its_name(
    hub_server: HubServer, start_cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub_server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    flags = ("someone/tiny", "--revision", "v1", "--workers", "2", "--worker-num-pages", "256")
    with start_cluster_of(*flags) as cluster:
        assert "fetching someone/tiny: 100 %" in "\n".join(cluster.lines)
        assert "on model someone/tiny" in cluster.wait_for_line("^starting tokenizer")
        with httpx.Client(base_url=f"http://{cluster.http}/v1", timeout=120) as client:
            assert [model["id"] for model in client.get("/models").json()["data"]] == ["someone/tiny"]
            asked = {"model": "someone/tiny", "prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            answer = client.post("/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 5
        pid = cluster.service_pid("sapwood_tokenizer")
        assert f"--revision={hub_server.repos['someone/tiny'].refs['v1']}" in Path(f"/proc/{pid}/cmdline").read_text()
    sizes = {name: len(content) for name, content in hub_server.repos["someone/tiny"].files("v1").items()}
    assert hub_server.sent_bytes == sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    asked = [request.path for request in hub_server.asked("GET", "/api/models/someone/tiny/revision/")]
    assert len(asked) <= 4, "the command asked for both services, they did not"


@pytest.mark.slow
def test_services_that_are_started_by_themselves_fetch_it_once_for_all(hub_server: HubServer, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub_server.url, "HF_HOME": str(tmp_path / "hf")}
    environment |= {
        "HF_HUB_DOWNLOAD_TIMEOUT": "300",
        "HF_HUB_ETAG_TIMEOUT": "300",
    }  # none asks twice because it is slow
    flags = ("--model", "someone/tiny", "--revision", "v1", "--port", "0")
    hub_server.gate.clear()
    services = [
        subprocess.Popen(
            [sys.executable, "-m", f"sapwood_{name}", *flags, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for name, more in (
            ("worker", ("--num-pages", "64", "--threads", "1")),
            ("worker", ("--num-pages", "64", "--threads", "1")),
            ("tokenizer", ()),
        )
    ]
    try:
        shards = {path for path in hub_server.repos["someone/tiny"].files("v1") if path.endswith(".safetensors")}
        hub_server.wait_for(
            lambda: len(hub_server.asked("HEAD", min(shards))) >= 2
        )  # each worker has come to the weights
        hub_server.gate.set()
        for service in services:
            assert service.stdout is not None
            lines = []
            for line in service.stdout:
                lines.append(line)
                if "listening on" in line:
                    break
            else:
                pytest.fail("".join(lines))
            assert "someone/tiny" in "".join(lines)
    finally:
        for service in services:
            service.terminate()
        for service in services:
            service.communicate(timeout=120)
    files = hub_server.repos["someone/tiny"].files("v1")
    assert hub_server.sent_bytes == sum(len(files[name]) for name in shards)


@pytest.mark.slow
def test_a_model_in_s3_is_served_by_its_folders_name(
    hub_server: HubServer, start_cluster_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub_server.repos["someone/tiny"].files("v1")
    bucket = ObjectStoreServer()
    bucket.objects = {f"bucket/models/tiny/{name}": content for name, content in files.items()}
    bucket.start()
    for name, value in (("ENDPOINT_URL", bucket.url), ("ALLOW_HTTP", "true"), ("REGION", "here")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "home"))
    try:
        with (
            start_cluster_of("s3://bucket/models/tiny", "--workers", "1", "--worker-num-pages", "256") as cluster,
            httpx.Client(base_url=f"http://{cluster.http}/v1", timeout=120) as client,
        ):
            assert [model["id"] for model in client.get("/models").json()["data"]] == ["tiny"]
            asked = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            assert client.post("/completions", json=asked).json()["usage"]["completion_tokens"] == 5
    finally:
        bucket.stop()
    weights = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    assert {name: bucket.sent[f"bucket/models/tiny/{name}"] for name in weights} == {
        name: len(content) for name, content in weights.items()
    }
