from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sapwood_testing.vocabularies import byte_level, corpus, deepseek, demo, llama3, mistral, packaged, qwen3

__all__ = ["byte_level", "corpus", "deepseek", "demo", "llama3", "mistral", "packaged", "qwen3"]


class Service:
    """A running ``python -m sapwood_tokenizer``."""

    def __init__(self, model: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sapwood_tokenizer", "--model", str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.address = ""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if found := re.search(r"listening on (\S+)", line):
                self.address = found.group(1)
                return
        raise AssertionError("the service did not start:\n" + "".join(seen))

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture(scope="session")
def small_vocabulary(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the small tokenizer."""
    folder = tmp_path_factory.mktemp("vocabulary") / "model"
    folder.mkdir()
    byte_level.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    return folder


@pytest.fixture(scope="session")
def common_service(small_vocabulary: Path) -> Iterator[Service]:
    """The service on the small tokenizer, for tests that leave it as they found it, caches aside."""
    running = Service(small_vocabulary)
    yield running
    running.stop()


@pytest.fixture
def start_service(small_vocabulary: Path) -> Iterator[Callable[..., Service]]:
    """Starts the service on a directory with the small tokenizer."""
    running: list[Service] = []

    def start(*flags: str) -> Service:
        running.append(Service(small_vocabulary, *flags))
        return running[-1]

    yield start
    for service in running:
        if service.process.poll() is None:
            service.process.kill()
            service.process.communicate()
