"""What is left of a step that failed: a file about the last steps, without tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sapwood_worker.core.observers import KEPT_STEPS, MOST_FILES, CrashDump
from sapwood_worker.records.load import Load
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Step

INFO = ModelInfo(
    architecture="fake", dtype="none", context_length=64, vocab_size=50, eos_token_ids=(), page_size=4, num_pages=8
)
TOKEN = 48_151_623


def step(number: int) -> Step:
    counts = np.array([3, 1])
    return Step(
        number,
        rows=np.array([0, 2]),
        starts=np.array([0, 9]),
        counts=counts,
        samples=np.array([1, 1]),
        token_ids=np.full(4, TOKEN),
        pages=np.zeros((2, 3), np.int32),
    )


def test_a_dump_has_the_last_steps_shapes_and_the_failure_but_no_tokens(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path / "dumps", INFO)
    for number in range(KEPT_STEPS + 5):
        dump.planned(step(number))
    path = dump.write(RuntimeError("device lost"), ["r-1", "r-2"], Load(running_requests=2, num_pages=8))
    assert path is not None
    assert str(TOKEN) not in path.read_text()
    found = json.loads(path.read_text())
    assert [each["number"] for each in found["steps"]] == list(range(5, KEPT_STEPS + 5))
    last = found["steps"][-1]
    assert last["shapes"]["token_ids"] == [4, "int64"]
    assert last["shapes"]["pages"] == [2, 3, "int32"]
    assert (last["rows"], last["starts"], last["counts"]) == ([0, 2], [0, 9], [3, 1])
    assert found["requests"] == ["r-1", "r-2"]
    assert "RuntimeError: device lost" in "".join(found["error"])
    assert (found["load"]["running_requests"], found["model"]["page_size"]) == (2, 4)


def test_the_oldest_files_go(tmp_path: Path) -> None:
    dump = CrashDump(tmp_path, INFO)
    written = [dump.write(RuntimeError(str(number)), [], Load()) for number in range(MOST_FILES + 3)]
    assert sorted(tmp_path.iterdir()) == sorted(path for path in written[3:] if path is not None)


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    assert CrashDump(tmp_path / "taken", INFO).write(RuntimeError("x"), [], Load()) is None
    assert "no crash dump could be written" in caplog.text
