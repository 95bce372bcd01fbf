"""A batch of 1 000 rows whose client, router and worker are killed on the way loses no row and repeats none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sapwood.client import Client, UnavailableError

ROWS = 1000
SCRIPT = Path(__file__).with_name("batch_of_rows.py")
PATIENT = {"SAPWOOD_ROUTER_WORKER_SILENCE": "30", "SAPWOOD_ROUTER_RESUME_GRACE": "120"}


def entries(journal: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal after the first."""
    if not journal.exists():
        return []
    text = journal.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()[1:]]


def wait_for(journal: Path, rows: int, client: subprocess.Popen[str]) -> None:
    """Returns once the journal has so many rows; fails if the client ends before."""
    while len(entries(journal)) < rows:
        assert client.poll() is None, client.communicate()
        time.sleep(0.05)


def _answers(client: Client) -> bool:
    try:
        return bool(client.list_models())
    except UnavailableError:
        return False


@contextmanager
def own_router(cluster: Any, port: int) -> Iterator[subprocess.Popen[str]]:
    """A router of the test's own over the cluster's tokenizer and workers, on a port that it keeps after a restart."""
    command = [sys.executable, "-m", "sapwood_router", "--port", str(port), "--http-port", "0"]
    command += ["--tokenizer", cluster.tokenizer, "--workers", *cluster.workers]
    router = subprocess.Popen(command, env=os.environ | PATIENT, text=True, stderr=subprocess.DEVNULL)
    try:
        with Client(f"127.0.0.1:{port}") as client:
            while not _answers(client):
                assert router.poll() is None, "the router ended"
                time.sleep(0.2)
        yield router
    finally:
        router.kill()
        router.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_client_router_and_worker_are_killed_and_each_row_is_there_once(server: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    address = f"127.0.0.1:{port}"

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), address, str(journal), str(ROWS)]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with own_router(server, port) as router:
        client = start()
        wait_for(journal, 200, client)
        os.kill(client.pid, signal.SIGKILL)  # 1: the client
        client.communicate()
        before = len(entries(journal))
        assert 200 <= before < ROWS
        client = start()
        wait_for(journal, 450, client)
        os.kill(router.pid, signal.SIGKILL)  # 2: the router
        router.wait()
    with own_router(server, port):
        wait_for(journal, 700, client)
        os.kill(server.service_pid("sapwood_worker"), signal.SIGKILL)  # 3: the worker
        out, err = client.communicate(timeout=1500)
        assert (client.returncode, out.strip()) == (0, str(ROWS)), err
        found = entries(journal)
        assert sorted(each["row"] for each in found) == list(range(ROWS))
        assert not [each for each in found if each["error"] is not None]
        by_row = {each["row"]: each for each in found}
        with Client(address) as by_hand:
            for row in range(0, ROWS, 50):
                first = by_hand.generate(f"Row {row} begins so:", max_tokens=3, temperature=0).text()
                second = by_hand.generate(f"Row {row} begins so:{first} and then", max_tokens=2, temperature=0).text()
                assert by_row[row]["returned"] == first + second
