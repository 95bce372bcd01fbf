"""`sapwood doctor` on this machine, and on one that lacks what it looks for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

from sapwood.cli.doctor.finding import Finding
from sapwood.cli.doctor.machine import examine_disks, examine_memory
from sapwood.cli.doctor.software import examine_protos, problems_of
from sapwood.cli.doctor.verb import examine_hub, examine_ports
from sapwood_testing.models.hub_server import HubServer

ROOT = Path(__file__).resolve().parents[2]


def doctor(environment: dict[str, str], *words: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-m", "sapwood.cli.main", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.mark.slow
def test_what_this_machine_has_is_listed_and_enough(tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 580.65.06\n")
    driver.chmod(0o755)
    server = HubServer()
    server.start()
    try:
        places = {"HF_ENDPOINT": server.url, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HF_TOKEN": ""}
        done = doctor(os.environ | places, "--json")
    finally:
        server.stop()
    assert (done.returncode, done.stderr) == (0, "")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    for name in ("python", "router", "tokenizer", "worker", "protos", "torch", "driver", "cores"):
        assert findings[name]["state"] == "ok", findings[name]
    assert findings["driver"]["found"] == "NVIDIA 580.65.06"
    assert findings["hub"] == {
        "name": "hub",
        "state": "ok",
        "found": f"{server.url} answers, without a token: private and gated models need HF_TOKEN",
        "mend": "",
    }
    assert {"memory", "open files", "disk SAPWOOD_HOME", "disk HF_HOME", "demo model", "ports"} <= findings.keys()
    if "cpu" in findings["torch"]["found"]:
        assert findings["gpu"]["state"] == "note"
        assert findings["gpu"]["mend"].startswith("pip install torch --index-url")


def doctor_among(folder: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    """What it says where only these packages of those here are installed."""
    for package in packages:
        found = util.find_spec(package)
        assert found is not None and found.origin is not None
        (folder / package).symlink_to(Path(found.origin).parent)
    (folder / "sapwood-0.1.0.dist-info").mkdir()
    here = metadata.distribution("sapwood")
    (folder / "sapwood-0.1.0.dist-info" / "METADATA").write_text(here.read_text("METADATA") or "")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return doctor(environment | {"PYTHONPATH": str(folder)}, python=("-S",))


def test_without_the_package_that_reads_requirements_that_is_said_once(tmp_path: Path) -> None:
    done = doctor_among(tmp_path, "sapwood", "sapwood_common", "sapwood_net")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("packaging") == 3  # its name, its command, and the last line
    assert "-> pip install packaging" in done.stdout
    assert "of router, tokenizer, worker, models, s3, cli, otel, bench cannot be looked at" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("missing for `sapwood up`: packaging")


def test_on_a_machine_without_the_services_packages_each_is_named_with_its_command(tmp_path: Path) -> None:
    done = doctor_among(tmp_path, "sapwood", "sapwood_common", "sapwood_net", "packaging")
    assert (done.returncode, done.stderr) == (1, "")
    assert "httptools (not installed)" in done.stdout
    assert "torch (not installed)" in done.stdout
    for service in ("router", "tokenizer", "worker"):
        assert f"-> pip install 'sapwood[{service}]'" in done.stdout
    assert done.stdout.splitlines()[-1] == "missing for `sapwood up`: router, tokenizer, worker"


def test_a_package_of_another_version_than_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "uvloop" else known(name))
    assert problems_of("router") == ["uvloop>=0.21 (0.1 is installed)"]


def test_stubs_that_are_missing_or_of_other_protos_are_told(tmp_path: Path) -> None:
    stubs = tmp_path / "sapwood" / "v1"
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copytree(ROOT / "sapwood" / "v1", stubs)
    assert examine_protos(stubs) == Finding("protos", "ok", "the stubs are of the protos that lie here")
    with (tmp_path / "protos" / "sapwood" / "v1" / "common.proto").open("a") as proto:
        proto.write("\nmessage Added {}\n")
    assert examine_protos(stubs) == Finding(
        "protos", "missing", "the stubs are not of the protos that lie here", "make proto"
    )
    (stubs / "common_pb2.py").unlink()
    assert examine_protos(stubs) == Finding("protos", "missing", f"common_pb2.py is not in {stubs}", "make proto")


def test_a_port_that_is_taken_is_named_with_its_use(free_port: int, taken_port: int) -> None:
    found = examine_ports({taken_port: "HTTP"})
    assert found == Finding("ports", "note", f"taken: {taken_port} (HTTP)", "sapwood up --ports auto")


def test_a_hub_that_is_far_or_forbidden_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the library reads variables once
    found = examine_hub()
    assert found.state == "note" and "http://127.0.0.1:9 does not answer (" in found.found
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert examine_hub().found.startswith("offline mode: only what is in")
    assert examine_hub().mend == "unset HF_HUB_OFFLINE"


def test_a_home_that_cannot_be_written_is_missing_while_the_demo_model_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    home, hub, demo = examine_disks()
    assert (home.name, home.state, home.mend) == ("disk SAPWOOD_HOME", "missing", "SAPWOOD_HOME=/a/folder/elsewhere")
    assert hub.found.startswith(f"{tmp_path / 'hf'}: ")
    assert (demo.state, demo.mend) == ("note", "sapwood model fetch demo")


def test_little_memory_is_told_with_smaller_settings() -> None:
    found = examine_memory("MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable: 3145728 kB\nHugePages_Total: 0\n")
    assert found.state == "note"
    assert found.found == "3.0 of 8.0 GiB free; two workers on the demo model take 5"
    assert found.mend.startswith("sapwood up --workers 1")
