"""A small real cluster: made-up weights, a vocabulary of bytes, a chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def chatting_model(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lang") / "tiny"
    shutil.copytree(dummy_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(chatting_model: Path, start_cluster_of: Any) -> Iterator[Any]:
    flags = ("--worker-load-format", "dummy", "--worker-num-pages", "2048", "--served-model-name", "tiny")
    with start_cluster_of("--model", str(chatting_model), *flags, "--workers", "1") as running:
        yield running
