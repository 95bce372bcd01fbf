"""A worker whose ranks are on two hosts, here two processes on one: who is lost is named, and all are started again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import parse_config
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.worker.fake_runner import continuation
from sapwood_testing.worker.group_key import group_key
from sapwood_worker.config import WorkerConfig

FAKE = (sys.executable, "-m", "sapwood_testing.worker.fake_worker", "--port", "0", "--poison-token", "999")
DIVERGE = 77


def two_hosts(port: int) -> tuple[str, ...]:
    return ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--rendezvous-key", group_key())


class FollowerNode:
    """The second host. ``log`` is what it has said so far."""

    def __init__(self, port: int, *flags: str) -> None:
        command = [*FAKE, *two_hosts(port), "--tensor-parallel", "2", "--node-rank", "1", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, text: str) -> None:
        while text not in self.log:
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

    def rank_pid(self) -> int:
        [pid] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(pid)

    def wait(self) -> int:
        code = self.process.wait(timeout=120)
        self._reader.join(timeout=60)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def follow() -> Iterator[Callable[..., FollowerNode]]:
    """Starts second hosts, which are killed after the test."""
    running: list[FollowerNode] = []

    def one(port: int, *flags: str) -> FollowerNode:
        running.append(FollowerNode(port, *flags))
        return running[-1]

    yield one
    for node in running:
        node.close()


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = continuation(prompt, SamplingParams(seed=11), 1000)
    return [next(tokens) for _ in range(count)]


def asking(stub: worker_pb2_grpc.WorkerStub, prompt: list[int], count: int) -> Iterator[list[int]]:
    sampling = common_pb2.SamplingParams(seed=11, max_tokens=count, ignore_eos=True)
    request = worker_pb2.WorkerGenerateRequest(request_id="r", token_ids=prompt, sampling=sampling)
    for response in stub.Generate(request, wait_for_ready=True):
        yield list(response.token_ids)


def answer(stub: worker_pb2_grpc.WorkerStub) -> list[int]:
    return [token for tokens in asking(stub, [4, 5], 20) for token in tokens]


def epoch_of(stub: worker_pb2_grpc.WorkerStub, other_than: int = 0) -> int:
    """The group's epoch, once it is up and not the one given."""
    while True:
        try:
            info = stub.GetModelInfo(worker_pb2.GetModelInfoRequest(), wait_for_ready=True)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
        else:
            if info.epoch != other_than:
                return int(info.epoch)
        time.sleep(0.05)


def lose(stub: worker_pb2_grpc.WorkerStub, doing: Callable[[], object]) -> str:
    """Does something to the group while it answers; returns what the client is told, once the group is up again."""
    epoch = epoch_of(stub)
    found: list[int] = []
    with pytest.raises(grpc.RpcError) as lost:
        for tokens in asking(stub, [1, 2, 3], 3000):
            if not found:
                doing()
            found += tokens
    assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
    assert found == expected([1, 2, 3], len(found))
    assert epoch_of(stub, epoch) > epoch
    assert answer(stub) == expected([4, 5], 20)
    return str(lost.value.details())


def test_losses_on_the_second_host_are_named_and_all_are_started_again(start, follow) -> None:
    port = port_of_its_own()
    node = follow(port)
    worker = start("--tensor-parallel", "2", *two_hosts(port))
    with grpc.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert answer(stub) == expected([4, 5], 20)
        told = lose(stub, lambda: os.kill(node.rank_pid(), signal.SIGKILL))
        assert "rank 1 of 2 (node 1): killed by signal 9" in told

        def leave() -> None:
            node.close()
            follow(port)

        assert "node 1 (rank 1 of 2) is lost: the connection has ended" in lose(stub, leave)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_who_stands_still_or_dies_on_the_first_host_is_named(start, follow, number) -> None:
    port = port_of_its_own()
    follow(port)
    worker = start("--tensor-parallel", "2", *two_hosts(port))
    with grpc.insecure_channel(worker.address) as channel:
        told = lose(worker_pb2_grpc.WorkerStub(channel), lambda: os.kill(worker.rank_pids()[0], number))
    how = "has given no sign of life for" if number == signal.SIGSTOP else ": killed by signal 9"
    assert "rank 0 of 2" in told
    assert how in told


@pytest.mark.slow
def test_who_stands_still_on_the_second_host_is_named(start, follow) -> None:
    port = port_of_its_own()
    node = follow(port)
    worker = start("--tensor-parallel", "2", *two_hosts(port))

    def stop_all() -> None:
        os.kill(node.process.pid, signal.SIGSTOP)
        threading.Timer(4.0, os.kill, (node.process.pid, signal.SIGCONT)).start()

    with grpc.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        told = lose(stub, lambda: os.kill(node.rank_pid(), signal.SIGSTOP))
        assert re.search(r"rank 1 of 2 \(node 1\): no sign of life for \d", told), told
        assert "node 1 (rank 1 of 2) is lost: no sign of life for" in lose(stub, stop_all)


@pytest.mark.slow
def test_a_host_that_leaves_while_models_are_loaded_is_waited_for(start, follow) -> None:
    port, flags = port_of_its_own(), ("--load-seconds", "2")
    node = follow(port, *flags)

    def replace() -> None:
        node.wait_for("ranks 1 to 1 of 2 start")
        node.close()
        follow(port, *flags)

    thread = threading.Thread(target=replace)
    thread.start()
    worker = start("--tensor-parallel", "2", *two_hosts(port), *flags)
    thread.join()
    assert "node 1 (rank 1 of 2) is lost: the connection has ended" in worker.log
    with grpc.insecure_channel(worker.address) as channel:
        assert answer(worker_pb2_grpc.WorkerStub(channel)) == expected([4, 5], 20)


@pytest.mark.slow
def test_a_rank_of_the_second_host_that_samples_other_tokens_is_named(start, follow) -> None:
    port, flags = port_of_its_own(), ("--diverge-token", str(DIVERGE))
    follow(port, *flags)
    worker = start("--tensor-parallel", "2", *two_hosts(port), *flags)
    with grpc.insecure_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        epoch = epoch_of(stub)
        with pytest.raises(grpc.RpcError, match="rank 1 diverged: in step"):
            list(asking(stub, [DIVERGE], 5))
        assert epoch_of(stub, epoch) > epoch


@pytest.mark.slow
def test_hosts_with_other_settings_and_strangers_are_refused_by_name(start, follow) -> None:
    port = port_of_its_own()
    other = follow(port, "--page-size", "8")
    beyond = follow(port, "--node-rank", "2", "--nnodes", "3", "--tensor-parallel", "3")
    starting: list[object] = []
    thread = threading.Thread(target=lambda: starting.append(start("--tensor-parallel", "2", *two_hosts(port))))
    thread.start()
    assert other.wait() == 1
    assert "the first node refuses this one: its --page-size is 8, here it is 16" in other.log
    assert beyond.wait() == 1
    assert "--node-rank 2 is not from 1 to 1" in beyond.log
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1", b"\xff" * 99, b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
    follow(port)
    thread.join(timeout=120)
    [worker] = starting
    with grpc.insecure_channel(worker.address) as channel:
        assert answer(worker_pb2_grpc.WorkerStub(channel)) == expected([4, 5], 20)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tensor-parallel", "2"), "--rendezvous '': --nnodes 2 needs HOST:PORT"),
        (("--tensor-parallel", "2", "--rendezvous", "here:x"), "--rendezvous 'here:x': --nnodes 2 needs HOST:PORT"),
        (("--tensor-parallel", "3", "--rendezvous", "a:1"), "--nnodes 2: 3 ranks cannot be spread evenly over so many"),
        (
            ("--tensor-parallel", "2", "--rendezvous", "a:1"),
            "--rendezvous-key: --nnodes 2 needs a file with a secret that all hosts have",
        ),
    ],
)
def test_nodes_and_ranks_that_do_not_fit_are_named(flags: tuple[str, ...], said: str) -> None:
    config = parse_config(WorkerConfig, "worker", "", ["--nnodes", "2", *flags])
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        _ = config.meeting_place
