"""How many CPUs a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sapwood_common.cores import usable_cores


@pytest.mark.parametrize(
    ("limit", "wanted"), [("max 100000\n", 6), ("250000 100000\n", 2), ("50000 100000\n", 1), ("900000 100000\n", 6)]
)
def test_a_container_s_limit_counts(limit: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    (tmp_path / "cpu.max").write_text(limit)
    assert usable_cores(tmp_path) == wanted


def test_without_a_control_group_it_is_those_it_may_run_on(tmp_path: Path):
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
