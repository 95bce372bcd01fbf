"""Clusters in the background: started, listed, shown and stopped; what has ended is listed no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from sapwood.cli.local.running import Record, running_clusters
from sapwood.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path))
    return tmp_path


def sapwood(*words: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sapwood.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_record_lasts_as_long_as_its_cluster(home: Path) -> None:
    record = Record("tiny")
    assert [(each.pid, each.model, each.http) for each in running_clusters()] == [(os.getpid(), "tiny", "")]
    record.answers("http://127.0.0.1:1", "127.0.0.1:2")
    assert [each.grpc for each in running_clusters()] == ["127.0.0.1:2"]
    record.close()
    assert running_clusters() == [] and list((home / "run").iterdir()) == []


def test_the_record_of_a_killed_cluster_goes(home: Path) -> None:
    program = "import time; from sapwood.cli.local.running import Record; r = Record('x'); print(1, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [each.pid for each in running_clusters()] == [process.pid]
        process.kill()
    assert running_clusters() == [] and list((home / "run").iterdir()) == []


def test_several_clusters_are_told_apart_by_number_or_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Record("one")
    program = "import time; from sapwood.cli.local.running import Record; r = Record('two'); print(1, flush=True); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        second.stdout.readline()
        assert main(["stop"]) == 2
        assert f"{os.getpid()} (one), {second.pid} (two)" in capsys.readouterr().err
        assert main(["stop", "three"]) == 2
        assert "three: no such cluster runs here" in capsys.readouterr().err
        assert main(["stop", "two"]) == 0
        assert second.wait(60) == -signal.SIGTERM
        assert main(["logs"]) == 2
        assert "writes to the terminal that it was started in" in capsys.readouterr().err
    first.close()


def test_a_detached_cluster_answers_is_listed_shown_and_stopped(home: Path, dummy_model: Path) -> None:
    flags = ("--workers", "1", "--ports", "auto", "--worker-load-format", "dummy", "--worker-num-pages", "64")
    began = sapwood("up", "--detach", "--model", str(dummy_model), *flags)
    assert began.returncode == 0, began.stdout + began.stderr
    assert "ready to answer in" in began.stdout and "Ctrl-C" not in began.stdout
    (found,) = [json.loads(line) for line in sapwood("ps", "--json").stdout.splitlines()]
    assert httpx.get(f"{found['http']}/v1/models", timeout=60, trust_env=False).status_code == 200
    assert dummy_model.name in sapwood("ps").stdout
    assert "ready to answer in" in sapwood("logs").stdout
    assert sapwood("stop").stdout == f"stopped {dummy_model.name} ({found['pid']})\n"
    assert running_clusters() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{found['http']}/v1/models", timeout=60, trust_env=False)


def test_a_detached_cluster_that_cannot_start_says_why(home: Path) -> None:
    wrong = sapwood("up", "--detach", "--worker-max-running", "x")
    assert wrong.returncode == 2 and "--worker-max-running" in wrong.stderr
    missing = sapwood("up", "--detach", "/nowhere")
    assert missing.returncode == 2 and "'/nowhere' is neither" in missing.stdout
    assert "it ended before it answered" in missing.stderr
    assert running_clusters() == []
