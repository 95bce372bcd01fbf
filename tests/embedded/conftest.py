"""A tiny model in a program of one's own."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

SETTINGS = {"load_format": "dummy", "num_pages": 1024, "threads": 1}


@pytest.fixture(scope="session")
def tiny(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary of bytes and an end, made-up weights and a chat template."""
    folder = tmp_path_factory.mktemp("embedded") / "tiny"
    shutil.copytree(dummy_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 272, "eos_token_id": 256}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return folder


def _children(parent: int | None = None) -> dict[int, str]:
    """Descendants of a process, of this one if none is given, that run a service: process id and module."""
    found: dict[int, str] = {}
    wanted = {os.getpid() if parent is None else parent}
    while wanted:
        below = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                above = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            module = next((word for word in words if word.startswith("sapwood_")), "")
            if above in wanted and module and not module.endswith(".bounded_process"):  # other tests' own
                below[int(entry.name)] = module
        found |= below
        wanted = set(below)
    return found


def _until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Waits until it is true; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Any]:
    """An engine for a module's tests, which leave it as they found it."""
    import sapwood

    with sapwood.Engine(str(tiny), **SETTINGS) as running:
        yield running


@pytest.fixture
def children() -> Callable[..., dict[int, str]]:
    """Descendants of a process that run a service."""
    return _children


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits until a condition is true."""
    return _until
