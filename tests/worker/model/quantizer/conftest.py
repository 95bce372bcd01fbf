"""A tiny model with a tokenizer, and a text that it half knows."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tiny(tiny_model, tmp_path) -> Path:
    """A tiny Llama with a word for each of its tokens."""
    path = shutil.copytree(tiny_model("wide").path, tmp_path / "tiny")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    draw = random.Random(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{draw.randint(3, 96)}" for _ in range(600)))
    return path


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", path], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this user may mount nothing")
    yield path
    subprocess.run(["umount", path], check=True)
