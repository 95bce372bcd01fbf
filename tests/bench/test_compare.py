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
    assert ["requests/s", "2", "3", "+50.0%", "better"] in rows
    assert ["output", "tokens/s", "20", "30", "+50.0%", "better"] in rows
    assert ["TTFT", "p50,", "ms", "50", "33.33", "-33.3%", "better"] in rows
    assert ["TTFT", "p99,", "ms", "200", "200", "+0.0%"] in rows
    assert ["failed", "0", "0", "-"] in rows
    assert "inter-token" not in printed
    assert "+0.0%" in second
    assert "better" not in second
    assert printed.endswith("in one of them only: concurrency 16\n")
    assert "WARNING" not in printed


def test_what_makes_two_results_no_comparison_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = result(tmp_path / "a", {1: 2.0}), result(tmp_path / "b", {1: 3.0}, seed=2)
    assert main(["bench", "compare", one, other]) == 0
    assert "WARNING seed differs: 1 and 2" in capsys.readouterr().out
    assert main(["bench", "compare", one, result(tmp_path / "c", {2: 3.0})]) == 2
    assert capsys.readouterr().err == (
        "sapwood: no load is in both: BEFORE has concurrency 1, AFTER concurrency 2; measure the same --concurrency or --rate\n"
    )


def test_prompts_that_one_run_found_in_the_cache_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path(result(tmp_path / name, {4: rate})) for name, rate in (("a", 2.0), ("b", 1.0))]
    for path, cached, failed in zip(paths, (10, 990), (0, 3), strict=True):
        content = json.loads(path.read_text())
        content["levels"][0] |= {"requests": 8, "input_tokens": 1000, "cached_tokens": cached, "failed": failed}
        path.write_text(json.dumps(content))
    assert main(["bench", "compare", *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["prompts", "cached,", "%", "1", "99", "-"] in rows
    assert ["requests", "8", "8", "-"] in rows
    assert ["requests/s", "2", "1", "-50.0%", "worse"] in rows
    assert ["failed", "0", "3", "-", "worse"] in rows
    assert "WARNING the server had 1% and 99% of the prompts in its cache: empty it before each run" in printed
    assert main(["bench", "compare", str(paths[0]), str(paths[0])]) == 0
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"levels": 5}', '{"levels": [5]}', '{"levels": [{"load": {"x": "y"}}]}']
)
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = result(tmp_path / "good", {1: 2.0}), tmp_path / "bad"
    bad.write_text(text)
    assert main(["bench", "compare", good, str(bad)]) == 2
    assert f"{bad} is no result of `sapwood bench --json`" in capsys.readouterr().err
