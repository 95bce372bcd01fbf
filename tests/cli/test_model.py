"""`sapwood model fetch|path|list` as a shell sees them, with a hub on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood_testing.models.hub_server import HubServer, Repo

WEIGHTS = b"w" * 2_000_000
PATIENT = {"HF_HUB_DOWNLOAD_TIMEOUT": "300", "HF_HUB_ETAG_TIMEOUT": "300"}
"""Seconds in which a process that gets little of a core does not ask a second time."""
SAPWOOD = [sys.executable, "-m", "sapwood.cli.main"]


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    server.start()
    server.repos["someone/tiny"] = Repo()
    server.repos["someone/tiny"].commit({"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS})
    yield server
    server.stop()


@pytest.fixture
def environment(hub_server: HubServer, tmp_path: Path) -> dict[str, str]:
    """A machine with an empty cache, whose hub is the test's."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HTTP", "http", "NO_PROXY"))
    }
    return (
        kept
        | {"HF_ENDPOINT": hub_server.url, "HF_HOME": str(tmp_path / "hf"), "SAPWOOD_HOME": str(tmp_path / "sw")}
        | PATIENT
    )


def sapwood(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*SAPWOOD, *words], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    return done


def test_a_fetched_model_is_listed_and_found_where_it_lies(hub_server: HubServer, environment: dict[str, str]) -> None:
    missing = sapwood(environment, "model", "path", "someone/tiny")
    assert missing.returncode == 1
    assert missing.stderr.endswith("fetch it: sapwood model fetch someone/tiny\n")
    assert hub_server.requests == []
    fetched = sapwood(environment, "model", "fetch", "someone/tiny")
    assert fetched.returncode == 0
    assert fetched.stderr.splitlines()[0] == "fetching someone/tiny: 2 MB"
    assert fetched.stderr.splitlines()[-1] == "fetching someone/tiny: 100 %"
    path = Path(fetched.stdout.strip())
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert path.is_relative_to(environment["HF_HOME"])
    assert sapwood(environment, "model", "path", "someone/tiny").stdout == fetched.stdout
    listed = sapwood(environment, "model", "list").stdout.split()
    assert listed == ["someone/tiny", "main", path.name[:12], "2.0", "MB"]
    offline = sapwood(environment | {"HF_HUB_OFFLINE": "1"}, "model", "fetch", "someone/tiny")
    assert offline.stdout == fetched.stdout


def test_token_proxy_and_offline_mode_are_the_librarys_own_variables(
    hub_server: HubServer, environment: dict[str, str]
) -> None:
    hub_server.repos["someone/tiny"].private = True
    hub_server.tokens = {"hf_mine"}
    offline = sapwood(environment | {"HF_HUB_OFFLINE": "1"}, "model", "fetch", "someone/tiny")
    assert offline.returncode == 1
    assert offline.stderr.startswith("sapwood: someone/tiny is not wholly in the cache at")
    assert offline.stderr.count("\n") == 1
    assert hub_server.requests == []
    behind = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub_server.url, "HF_TOKEN": "hf_mine"}
    assert sapwood(environment | behind, "model", "fetch", "someone/tiny").returncode == 0
    assert hub_server.sent_bytes == len(WEIGHTS)
    assert all(request.through_proxy for request in hub_server.requests)


def test_several_processes_of_a_host_download_once(hub_server: HubServer, environment: dict[str, str]) -> None:
    hub_server.gate.clear()
    processes = [
        subprocess.Popen([*SAPWOOD, "model", "fetch", "someone/tiny"], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    # Each process has asked where the weights lie before either gets a byte of them.
    hub_server.wait_for(lambda: len(hub_server.asked("HEAD", "model.safetensors")) >= 2)
    hub_server.gate.set()
    paths = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(paths) == 1
    assert hub_server.sent_bytes == len(WEIGHTS)


def test_ctrl_c_ends_a_fetch_and_the_next_one_goes_on(hub_server: HubServer, environment: dict[str, str]) -> None:
    hub_server.gate.clear()
    fetch = subprocess.Popen(
        [*SAPWOOD, "model", "fetch", "someone/tiny"], env=environment, stderr=subprocess.PIPE, text=True
    )
    hub_server.wait_for(lambda: bool(hub_server.asked("GET", "/lfs/")))
    fetch.send_signal(signal.SIGINT)
    said = fetch.communicate(timeout=120)[1]
    assert (fetch.returncode, said.strip()) == (130, "")
    hub_server.gate.set()
    assert sapwood(environment, "model", "fetch", "someone/tiny").returncode == 0


def test_a_full_disk_is_one_line(hub_server: HubServer, environment: dict[str, str], tmp_path: Path) -> None:
    hub_server.repos["someone/tiny"].commit({"config.json": b"{}", "tokenizer.json": b"x" * 500_000})
    small = tmp_path / "hf"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this user may mount nothing")
    try:
        done = sapwood(environment, "model", "fetch", "someone/tiny")
    finally:
        subprocess.run(["umount", small], check=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"sapwood: someone/tiny: the disk of {small}/hub is full: make room, or set HF_HOME to a folder elsewhere\n"
    )


def test_a_name_that_is_none_says_what_names_there_are(environment: dict[str, str]) -> None:
    done = sapwood(environment, "model", "fetch", "tiny")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nor a name on the hub (owner/name, or owner/name:file.gguf)" in done.stderr
