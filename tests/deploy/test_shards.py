"""Slow tests in shards: each test is in one of them, whichever machine asks, and CI runs the one that its commit names."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shard() -> Callable[[dict[str, float], str], set[str]]:
    spec = importlib.util.spec_from_file_location("conftest_of_all", ROOT / "tests" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[dict[str, float], str], set[str]] = module._shard
    return found


def test_each_unit_is_in_one_shard_and_shards_take_about_as_long(shard) -> None:
    durations = {f"tests/test_{number}.py": float(number % 17 * 10) for number in range(100)}
    shards = [shard(durations, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(unit for units in shards for unit in units) == sorted(durations)
    seconds = [sum(durations[unit] for unit in units) for units in shards]
    assert max(seconds) - min(seconds) <= 160
    backwards = dict(reversed(durations.items()))
    assert [shard(backwards, f"{number}/3") for number in (1, 2, 3)] == shards, "the order of collection says nothing"


@pytest.mark.parametrize("wrong", ["3", "0/3", "4/3", "a/b", "1/"])
def test_what_is_no_shard_is_refused(shard, wrong: str) -> None:
    with pytest.raises(pytest.UsageError, match=re.escape(wrong)):
        shard({}, wrong)


def test_every_commit_names_a_shard_of_the_slow_tests_and_one_of_the_containers() -> None:
    """CI's own lines, with commits of all kinds."""
    script = (ROOT / ".ci" / "run").read_text()
    (part,) = re.findall(r"^part=.*$", script, re.MULTILINE)
    shards = re.findall(r'SHARD="([^"]*)"', script)
    seen = set()
    for commit in ("0" * 40, "f" * 40, "8" * 39 + "9", "123456789abcdef0" * 2 + "01234567", "deadbeef" * 5):
        lines = f'commit={commit}\n{part}\necho "{" ".join(shards)}"'
        done = subprocess.run(["bash", "-euc", lines], capture_output=True, text=True, check=True, timeout=60)
        assert re.fullmatch(r"[1-6]/6 [12]/2\n", done.stdout)
        seen.add(done.stdout)
    assert len(seen) > 1
