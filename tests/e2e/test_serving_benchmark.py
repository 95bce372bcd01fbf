"""The GPU's serving benchmark, as far as it goes without a GPU: every service as a process, both protocols."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "bench_serving.py"
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "eos_token_id": 9,
}  # fmt: skip
SMALL = ("--device", "cpu", "--kv-gb", "0.1", "--shortest", "4", "--longest", "12", "--clients", "1", "--singles", "1")


def figures(folder: Path, *flags: str) -> dict[str, float]:
    """What the benchmark printed: values by name, the model's left out."""
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    command = [sys.executable, str(SCRIPT), "--model", str(model), *SMALL, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["what"].removeprefix("tiny "): row["value"] for row in rows}


def test_every_request_is_answered_in_full_by_both_protocols(tmp_path):
    fake = ("--worker-module", "sapwood_testing.worker.fake_worker")
    found = figures(tmp_path, *fake, "--requests", "4", "--only", "offline")
    for kind in ("gRPC", "HTTP"):
        assert found[f"offline4 {kind}"] > 0
        assert found[f"offline4 {kind} TTFT p99"] >= found[f"offline4 {kind} TTFT p50"] > 0
        assert found[f"offline4 {kind} piece"] >= 1


def test_engines_side_by_side_have_one_table(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    script, rows = str(SCRIPT.with_name("bench_beside.py")), tmp_path / "rows.jsonl"
    asked = ("--divide", "64", "--batches", "1,128", "--rates", "50", "--requests", "4")
    fake = ("--worker-module", "sapwood_testing.worker.fake_worker", "--worker-flags=--step-ms 1")
    command = [sys.executable, script, "--config", str(tmp_path / "tiny"), *asked, *fake]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = [json.dumps({"what": "tiny prefill 1 x 8192", "value": 7.25, "unit": "ms", "engine": "vllm"})]
    rows.write_text("\n".join([*done.stdout.splitlines(), *theirs]))
    table = subprocess.run(
        [sys.executable, script, "--table", str(rows)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert table[0] == "| figure | sapwood | vllm |"
    found = {line.split(" | ")[0].removeprefix("| tiny "): line.split(" | ")[1:] for line in table[2:]}
    assert float(found["decode 2, at temperature 2, ms a token"][0]) > 0
    assert float(found["load of 50 a second, first token p99, ms"][0]) > 0
    assert found["prefill 1 x 8192, ms"][1].startswith("7.25")
    assert found["shared 64 x (8192 + 128), first waves, s"][1].strip("| ") == ""


@pytest.mark.slow
def test_a_random_model_on_the_cpu_runs_all_workloads(tmp_path):
    found = figures(tmp_path, "--requests", "6", "--rate", "40")
    wanted = ("one 12 gRPC TTFT", "offline6 HTTP", "poisson fresh gRPC inter-token p99", "poisson cached HTTP TTFT p99")
    assert all(found[name] > 0 for name in wanted)
