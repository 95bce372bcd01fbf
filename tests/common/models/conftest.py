"""A hub on this machine with one small model, and a cache of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood_testing.models.hub_server import HubServer, Repo

WEIGHTS = {f"model-0000{number}-of-00002.safetensors": bytes([number]) * 3_000_000 for number in (1, 2)}
DESCRIPTION = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "1_Pooling/config.json": b"{}",
    "model.safetensors.index.json": (
        b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    ),
}
OTHERS = {
    "README.md": b"read me",
    "consolidated.safetensors": b"the same weights once more",
    "pytorch_model.bin": b"and again",
    "onnx/config.json": b"{}",
    "original/tokenizer.model": b"another",
}


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    server.start()
    repo = Repo()
    repo.commit({**DESCRIPTION, **WEIGHTS, **OTHERS})
    server.repos["someone/tiny"] = repo
    yield server
    server.stop()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    return folder
