"""Other people's benchmarks and evaluations run to their end against the demo model, without a failed request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)]

REVISION = "0" * 40


@pytest.fixture(scope="session")
def tokenizer_folder(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes as transformers reads it: the tools count tokens of texts that they make up."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_bytes((dummy_model / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.parametrize(
    ("path", "profile"),
    [("/v1/chat/completions", "kind=concurrent,streams=2"), ("/v1/completions", "kind=synchronous")],
)
def test_guidellm_measures(
    cluster: Any, make_environment: Any, run_client: Any, show_versions: Any, tmp_path: Path, path: str, profile: str
) -> None:
    show_versions("guidellm==0.8.1")
    programs = make_environment("guidellm==0.8.1", shares=True)
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    rows = [{"prompt": f"Question {number}: what is", "output_tokens_count": 4} for number in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    run_client(
        *(programs / "guidellm", "run", "--disable-console", "--profile", profile),
        *("--backend", f"kind=openai_http,target=http://{cluster.http},request_format={path}"),
        *("--constraint", "kind=max_requests,count=4", "--data", f"kind=json_file,path={data}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    found = {kind: len(requests) for kind, requests in benchmark["requests"].items() if kind != "total"}
    # On a busy machine it may end before its last request is reported.
    assert found.pop("successful") in (3, 4)
    assert found == {"incomplete": 0, "errored": 0}


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_aiperf_measures(
    cluster: Any,
    make_environment: Any,
    run_client: Any,
    show_versions: Any,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
) -> None:
    show_versions("aiperf==0.13.0")
    # Without a network it takes a tokenizer from the hub's cache only, no folder.
    kept = tmp_path / "home" / "hub" / "models--tests--bytes"
    shutil.copytree(tokenizer_folder, kept / "snapshots" / REVISION)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(REVISION)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    programs = make_environment("aiperf==0.13.0", shares=True)
    run_client(
        *(programs / "aiperf", "profile", "--model", "demo", "--url", f"http://{cluster.http}", "--streaming"),
        *("--endpoint-type", endpoint, "--tokenizer", "tests/bytes", "--request-count", 4, "--concurrency", 2),
        *("--synthetic-input-tokens-mean", 24, "--synthetic-input-tokens-stddev", 0),
        *("--output-tokens-mean", 16, "--output-tokens-stddev", 0),
        *("--artifact-dir", tmp_path, "--ui", "none"),
    )
    (file,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text())
    assert report["request_count"]["avg"] == 4
    assert not report.get("error_summary")


@pytest.mark.parametrize("api", ["chat", "completion", "anthropic_messages"])
def test_inference_perf_measures(
    cluster: Any,
    make_environment: Any,
    run_client: Any,
    show_versions: Any,
    tokenizer_folder: Path,
    tmp_path: Path,
    api: str,
) -> None:
    show_versions("inference-perf==0.7.0")
    # It asks for Python 3.12 and needs nothing of it; av is held back to a version with wheels for ours.
    programs = make_environment("inference-perf==0.7.0", "av<17", "--ignore-requires-python", shares=True)
    lengths = {"min": 4, "max": 8, "mean": 6, "std_dev": 1, "total_count": 8}
    made_up = {"type": "random", "input_distribution": lengths, "output_distribution": lengths}
    config = {
        "load": {"type": "constant", "stages": [{"rate": 1, "duration": 4}], "num_workers": 1},
        "api": {"type": api, "streaming": True},
        "server": {"type": "vllm", "model_name": "demo", "base_url": f"http://{cluster.http}", "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer_folder)},
        "data": made_up if api == "completion" else {"type": "mock"},
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": False}},
        "storage": {"local_storage": {"path": str(tmp_path / "reports")}},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config))  # YAML holds JSON
    run_client(programs / "inference-perf", "--config_file", tmp_path / "config.yml")
    (file,) = (tmp_path / "reports").rglob("summary_lifecycle_metrics.json")
    report = json.loads(file.read_text())
    assert (report["successes"]["count"], report["failures"]["count"]) == (4, 0)


CHOICE = {
    "task": "capitals",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": ["Paris", "Rome"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
WRITTEN = {
    "task": "written",
    "output_type": "generate_until",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_target": "{{['Paris', 'Rome'][answer]}}",
    "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def test_lm_eval_evaluates(
    cluster: Any, make_environment: Any, run_client: Any, show_versions: Any, tokenizer_folder: Path, tmp_path: Path
) -> None:
    show_versions("lm-eval==0.4.13")
    programs = make_environment("lm-eval[api]==0.4.13", shares=True)
    rows = [{"country": "France", "answer": 0}, {"country": "Italy", "answer": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    for task in (CHOICE, WRITTEN):
        (tasks / f"{task['task']}.yaml").write_text(json.dumps(task | data | {"test_split": "test"}))
    backends = {
        "local-completions": ("/v1/completions", "capitals,written", ()),
        "local-chat-completions": ("/v1/chat/completions", "written", ("--apply_chat_template",)),
    }
    for model, (path, names, flags) in backends.items():
        settings = f"model=demo,base_url=http://{cluster.http}{path},num_concurrent=2,max_retries=1"
        settings += f",tokenizer={tokenizer_folder},tokenized_requests=False"
        run_client(
            *(programs / "lm_eval", "run", "--model", model, "--model_args", settings, "--tasks", names, *flags),
            *("--include_path", tasks, "--output_path", tmp_path / model),
        )
        (file,) = (tmp_path / model).rglob("results_*.json")
        results = json.loads(file.read_text())["results"]
        assert set(results) == set(names.split(","))
    assert json.loads(next((tmp_path / "local-completions").rglob("results_*.json")).read_text())["results"][
        "capitals"
    ]["acc,none"] in (0.0, 0.5, 1.0)
