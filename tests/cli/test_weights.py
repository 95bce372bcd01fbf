"""`sapwood weights` and `sapwood worker sleep|wake` against a real worker whose runner needs no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.cli.errors import REFUSED
from sapwood.cli.main import main
from sapwood_testing.worker.fake_runner import fake_weights
from sapwood_testing.worker.fake_worker_process import FakeWorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    running = FakeWorkerProcess()
    yield running.address
    running.process.kill()
    running.process.wait()


def test_weights_are_updated_and_shown(worker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "show", "--worker", worker]) == 0
    assert capsys.readouterr().out == f"{worker}: weights default\n"
    path = tmp_path / "new.safetensors"
    path.write_bytes(b"new")
    assert main(["weights", "update", str(path), "--version", "12", "--worker", worker]) == 0
    digest = fake_weights(b"new").hex()
    assert capsys.readouterr().out == f"{worker}: weights 12, digest {digest[:12]}\n"
    assert main(["weights", "show", "--worker", worker, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["version"], shown["digest"], shown["can_roll_back"]) == ("12", digest, False)
    assert main(["weights", "rollback", "--worker", worker]) == REFUSED
    assert "keep_previous" in capsys.readouterr().err


def test_a_worker_sleeps_and_wakes(worker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "sleep", "--worker", worker]) == 0
    assert capsys.readouterr().out == f"{worker}: asleep, bytes 2000\n"
    assert main(["worker", "wake", "--memory", "kv-cache", "--worker", worker]) == 0
    assert capsys.readouterr().out == f"{worker}: asleep\n"
    assert main(["worker", "wake", "--worker", worker]) == 0
    assert capsys.readouterr().out == f"{worker}: awake\n"
