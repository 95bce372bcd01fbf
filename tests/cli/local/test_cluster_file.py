"""A cluster's file has the settings of flags, which come before it, and `sapwood config` prints one that reads the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FILE = """
model: demo-base
workers: 3
worker:
  max-running: 8
router_policy: prefix_hash
"""


def config(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sapwood.cli.main", "config", *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAPWOOD_UP_")}
    return subprocess.run(command, capture_output=True, text=True, env=clean | variables, timeout=120, check=False)


def test_flags_come_before_variables_and_variables_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    done = config("-c", str(path), "--worker-page-size", "32", SAPWOOD_UP_WORKERS="2", SAPWOOD_WORKER_MAX_RUNNING="9")
    shown = yaml.safe_load(done.stdout)
    assert (shown["model"], shown["workers"], shown["router"]["policy"]) == ("demo-base", 2, "prefix_hash")
    assert {name: shown["worker"][name] for name in ("max-running", "page-size")} == {"max-running": 9, "page-size": 32}


def test_what_is_as_it_is_by_default_is_left_out_but_for_model_and_number() -> None:
    assert yaml.safe_load(config("--threads", "1").stdout) == {
        "model": "demo",
        "workers": 2,
        "worker": {"threads": 1},
    }


def test_models_that_differ_stand_under_their_services() -> None:
    shown = yaml.safe_load(config("--tokenizer-model", "demo-base", "--worker-max-running", "9").stdout)
    assert "model" not in shown
    assert (shown["tokenizer"], shown["worker"]["max-running"]) == ({"model": "demo-base"}, 9)


def test_a_cluster_without_a_router_reads_back_as_one(tmp_path: Path) -> None:
    first = config("some/model", "--no-router", "--http-port", "8123", "--threads", "1")
    expected = {"model": "some/model", "no-router": True, "http-port": 8123, "worker": {"threads": 1}}
    assert yaml.safe_load(first.stdout) == expected
    (tmp_path / "cluster.yaml").write_text(first.stdout)
    assert config("-c", str(tmp_path / "cluster.yaml")).stdout == first.stdout
    assert "--workers 3: with --no-router" in config("--no-router", "--workers", "3").stderr


def test_a_printed_configuration_reads_back_unchanged(tmp_path: Path) -> None:
    first = config("--all", "--workers", "1", "--router-policy", "prefix_hash")
    assert first.returncode == 0, first.stderr
    path = tmp_path / "all.yaml"
    path.write_text(first.stdout)
    assert config("--all", "-c", str(path)).stdout == first.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("worker: {max-runing: 3}", "there is no setting 'worker-max-runing'; did you mean worker-max-running?"),
        ("max-running: 3", "there is no setting 'max-running'; did you mean worker-max-running?"),
        ("worker: {max-running: x}", "--worker-max-running"),
        ("worker: 3", "worker must hold settings (name: value)"),
        ("workers: none at all", "--workers"),
        ("[1, 2]", "must hold settings (name: value)"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_setting(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    done = config("-c", str(path))
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_is_not_there_is_named() -> None:
    assert (
        "--config: cannot read /nowhere.yaml: No such file or directory" in config("--config", "/nowhere.yaml").stderr
    )


def test_a_setting_without_a_value_is_as_by_default(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model:\nworkers: 3\nthreads: ~\n")
    shown = yaml.safe_load(config("-c", str(path)).stdout)
    assert (shown["model"], shown["workers"]) == ("demo", 3)
