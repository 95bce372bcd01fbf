"""``make bench-fleet`` on a small fleet: the real policies against simulated workers, KV events heard by two routers."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "bench_fleet.py"
SMALL = (
    "--workers", "80", "--pages", "16000", "--rate", "400", "--warm", "0.3", "--seconds", "0.5",
    "--workloads", "turns", "--policies", "random", "cache_aware",
)  # fmt: skip


def test_a_small_fleet_gives_a_row_a_run_and_cache_aware_beats_random(tmp_path):
    out = tmp_path / "fleet.jsonl"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    fleet, *runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert fleet["pages"] == 16_000
    assert fleet["refused_pages"] == 0
    assert [row["policy"] for row in runs] == ["cache_aware", "random"]  # what follows events comes first
    ours, blind = runs
    assert ours["hit_rate"] > 2 * blind["hit_rate"] > 0
    assert min(ours["requests_a_second"], blind["requests_a_second"]) > 0
    assert ours["refused"] == blind["refused"] == 0
    assert ours["event_us_a_page"] > 0 == blind["event_us_a_page"]  # nobody follows what no policy asks for
    assert "| turns | cache_aware |" in done.stderr
