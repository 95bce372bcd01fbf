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


def test_under_overload_the_router_meets_more_objectives_than_one_that_knows_of_none():
    command = [sys.executable, str(SCRIPT), "--objectives", "--warm", "8", "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    blind, told = ({row["scenario"]: row for row in rows if row["objectives"] is known} for known in (False, True))
    calm, _, double, _, batch, bursts = blind
    assert told[calm]["chat_refused"] == 0 and told[calm]["chat_met_share"] == blind[calm]["chat_met_share"] > 0.99
    for name, least in ((double, 0.3), (batch, 0.9), (bursts, 0.9)):
        assert blind[name]["chat_met_share"] < least < told[name]["chat_met_share"]
    for name in (batch, bursts):  # what makes way is computed later, and all of it
        assert told[name]["batch_answered"] == blind[name]["batch_answered"] > 0
