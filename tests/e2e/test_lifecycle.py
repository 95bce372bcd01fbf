"""`sapwood up` and its services come and go as they should: cancellation, draining, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from sapwood.client import Client, DeadlineExceededError, UnavailableError
from sapwood.v1 import worker_pb2, worker_pb2_grpc

LONG = 400


def _loads(address: str, channel: grpc.Channel) -> Any:
    return worker_pb2_grpc.WorkerStub(channel).WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=10), timeout=120)


def _held_pages(load: Any) -> int:
    return int(load.used_pages - load.evictable_pages)


@pytest.mark.parametrize("end", ["cancel", "timeout", "vanish"])
def test_a_client_that_leaves_frees_its_pages(cluster: Any, end: str) -> None:
    channels = [grpc.insecure_channel(address) for address in cluster.workers]
    watches = [_loads(address, channel) for address, channel in zip(cluster.workers, channels, strict=True)]
    try:
        for watch in watches:
            before = next(watch).load
            assert (before.running_requests, _held_pages(before)) == (0, 0)
        for seconds in (3, 15, 60):  # where the machine is slow, the first may pass before there is a token
            client = Client(cluster.grpc, timeout=seconds if end == "timeout" else None)
            generation = client.generate("Count: one, two, three", max_tokens=LONG, temperature=0, ignore_eos=True)
            try:
                for _ in range(3):
                    next(generation)
                watch = _busy_one(cluster, watches)
            except DeadlineExceededError:
                watch = None
            if watch is not None:
                break
            client.close()
        if end == "cancel":
            generation.cancel()
        elif end == "vanish":
            client.close()
        generated = 0
        try:
            generated = sum(len(delta.token_ids) for delta in generation)
        except Exception as error:
            assert type(error).__name__ in ("CancelledError", "DeadlineExceededError"), error
        assert generated < LONG
        after = next(reply.load for reply in watch if reply.load.running_requests == 0)
        assert _held_pages(after) == 0
        assert after.queued_tokens == 0
        client.close()
    finally:
        for watch in watches:
            watch.cancel()
        for channel in channels:
            channel.close()


def _busy_one(cluster: Any, watches: list[Any]) -> Any:
    """The watch of the worker that runs the request; None where it is over already."""
    with Client(cluster.grpc) as client:
        busy = {worker.address for worker in client.list_workers() if worker.in_flight}
    if not busy:
        return None
    (watch,) = (watch for watch, address in zip(watches, cluster.workers, strict=True) if address in busy)
    while next(watch).load.running_requests == 0:
        pass
    return watch


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_0(start_cluster: Any) -> None:
    with (
        start_cluster("--workers", "1", "--drain-timeout", "200") as cluster,
        Client(cluster.grpc, timeout=200) as client,
    ):
        pids = _pids(cluster)
        running = client.generate("Once upon a time", max_tokens=500, temperature=0, ignore_eos=True)
        received = len(next(running).token_ids)
        cluster.process.send_signal(signal.SIGTERM)
        cluster.wait_for_line("SIGTERM: draining")
        with pytest.raises(UnavailableError):
            client.generate("Too late", max_tokens=1).text()
        received += sum(len(delta.token_ids) for delta in running)
        assert received == 500
        assert cluster.finish() == 0
        assert cluster.lines[-1] == "stopped"
        assert not any(_runs(pid) for pid in pids)


@pytest.mark.slow
def test_ctrl_c_stops_everything(start_cluster: Any) -> None:
    with start_cluster("--workers", "1") as cluster:
        pids = _pids(cluster)
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        assert not any(_runs(pid) for pid in pids)


def test_a_cluster_does_not_outlive_the_reader_of_its_output(dummy_model: Path) -> None:
    flags = f"--ports auto --workers 1 --model {dummy_model} --worker-load-format dummy"
    command = f"{sys.executable} -m sapwood.cli.main up {flags} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.startswith("starting tokenizer, 1 worker")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(start_cluster: Any) -> None:
    with start_cluster("--workers", "1", "--drain-timeout", "600") as cluster, Client(cluster.grpc) as client:
        generation = client.generate("Once upon a time", max_tokens=16000, temperature=0, ignore_eos=True)
        next(generation)
        cluster.process.send_signal(signal.SIGINT)
        cluster.wait_for_line("SIGTERM: draining")  # the first has been heard, and passed on to the services
        time.sleep(0.7)  # two signals at once would be one wish
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 130


@pytest.mark.slow
def test_dead_tokenizers_and_workers_restart_and_a_dead_router_ends_the_cluster(start_cluster: Any) -> None:
    with start_cluster("--workers", "1") as cluster, Client(cluster.grpc) as client:
        asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        whole = client.generate("The capital of France is", **asked).text()
        running = client.generate("The capital of France is", **asked)
        text = next(running).text
        os.kill(cluster.service_pid("sapwood_tokenizer"), signal.SIGKILL)
        cluster.wait_for_line("tokenizer was killed by SIGKILL: it is started again")
        assert client.generate("The capital of France is", **asked).text() == whole  # it waits, too
        assert text + "".join(delta.text for delta in running) == whole

        router, first = cluster.service_pid("sapwood_router"), cluster.service_pid("sapwood_worker")
        os.kill(first, signal.SIGKILL)
        cluster.wait_for_line("worker-0 was killed by SIGKILL: it is started again")
        deadline = time.monotonic() + 120
        while True:
            try:
                assert client.generate("The capital of France is", max_tokens=4, ignore_eos=True).text() is not None
                break
            except UnavailableError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        worker = cluster.service_pid("sapwood_worker")
        assert worker != first
        os.kill(router, signal.SIGKILL)
        assert cluster.finish() == 1
        shown = "\n".join(cluster.lines)
        assert "sapwood: router was killed by SIGKILL; its last lines:\n" in shown
        assert shown.rpartition("its last lines:\n")[2].strip()
        assert not _runs(worker)


def _pids(cluster: Any) -> list[int]:
    return [cluster.service_pid(f"sapwood_{name}") for name in ("tokenizer", "worker", "router")]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
