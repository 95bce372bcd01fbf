"""Two results side by side: loads in common, differences, what makes them no comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli.main import main


def result(path: Path, loads: dict[float, float], **more: Any) -> str:
    levels = [
        {
            "load": {"concurrency": load},
            "requests_per_second": rate,
            "output_tokens_per_second": 10 * rate,
            "ttft": {"p50": 0.1 / rate, "p99": 0.2},
            "itl": None,
            "failed": 0,
        }
        for load, rate in loads.items()
    ]
    path.write_text(json.dumps({"model": "demo", "seed": 1, "levels": levels, **more}))
    return str(path)


def test_loads_in_common_are_compared_figure_by_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = result(tmp_path / "a", {1: 2.0, 4: 4.0, 16: 5.0})
    after = result(tmp_path / "b", {1: 3.0, 4: 4.0})
    assert main(["bench", "compare", before, after]) == 0
    printed = capsys.readouterr().out
    first, second = printed.split("concurrency 4")
    rows = [line.split() for line in first.splitlines()]
    assert ["requests/s", "2", "3", "+50.0%"] in rows
    assert ["output", "tokens/s", "20", "30", "+50.0%"] in rows
    assert ["TTFT", "p50,", "ms", "50", "33.33", "-33.3%"] in rows
    assert ["failed", "0", "0", "-"] in rows
    assert "inter-token" not in printed
    assert "+0.0%" in second
    assert "1 loads are in one of them only" in printed
    assert "WARNING" not in printed


def test_what_makes_two_results_no_comparison_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = result(tmp_path / "a", {1: 2.0}), result(tmp_path / "b", {1: 3.0}, seed=2)
    assert main(["bench", "compare", one, other]) == 0
    assert "WARNING seed differs: 1 and 2" in capsys.readouterr().out
    assert main(["bench", "compare", one, result(tmp_path / "c", {2: 3.0})]) == 2
    assert "no load in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"levels": 5}', '{"levels": [5]}', '{"levels": [{"load": {"x": "y"}}]}']
)
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = result(tmp_path / "good", {1: 2.0}), tmp_path / "bad"
    bad.write_text(text)
    assert main(["bench", "compare", good, str(bad)]) == 2
    assert f"{bad} is no result of `sapwood bench --json`" in capsys.readouterr().err
