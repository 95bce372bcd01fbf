"""What the backend over NIXL does where a source stops or its connection breaks: no read ends while NIXL may still write."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from sapwood_worker.core.cache.transfer import in_place
from sapwood_worker.core.cache.transfer.nixl import NixlBackend
from sapwood_worker.core.cache.transfer.transfer_backend import TransferError
from sapwood_worker.model.pools.host_pool import HostPool


class _Agent:
    """NIXL's, whose transfers end when a test says so; notes what is asked of it."""

    def __init__(self) -> None:
        self.over, self.began = threading.Event(), threading.Event()
        self.state = "DONE"
        self.asked: list[str] = []

    def check_xfer_state(self, transfer: object) -> str:
        self.began.set()
        return self.state if self.over.is_set() else "PROC"

    def transfer(self, transfer: object) -> str:
        return self.check_xfer_state(transfer)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.asked.append("add")
        return b"source"

    def remove_remote_agent(self, name: str) -> None:
        self.asked.append("remove")

    def __getattr__(self, name: str) -> Any:
        return lambda *rest: name


class _Gone:
    """The connection to a source that does not listen any more."""

    def send(self, content: bytes) -> None:
        raise BrokenPipeError


def _begun(backend: NixlBackend, agent: _Agent) -> tuple[threading.Thread, list[Exception]]:
    """A read whose transfer has begun."""
    errors: list[Exception] = []

    def read() -> None:
        try:
            with backend._connected(b"metadata") as remote:
                backend._move(remote, [(0, 1)], [(0, 1)], _Gone())  # type: ignore[arg-type]
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert agent.began.wait(30)
    return thread, errors


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NixlBackend:
    monkeypatch.setattr(in_place, "SILENCE_SECONDS", 0.01)
    made = NixlBackend(None, HostPool(2, 128))
    made._agent = _Agent()
    return made


def test_a_read_lasts_as_long_as_its_transfer_and_its_source_stays_known_until_then(backend: NixlBackend) -> None:
    agent = backend._agent
    thread, errors = _begun(backend, agent)
    [remote] = backend._remotes.values()
    remote.broken = True  # another read of it has failed
    with pytest.raises(TransferError, match="broken"), backend._connected(b"metadata"):
        pass
    assert thread.is_alive() and agent.asked == ["add"]
    agent.over.set()
    thread.join(30)
    assert not errors and not remote.reads
    with backend._connected(b"metadata"):  # nobody reads from it any more
        assert agent.asked == ["add", "remove", "add"]


def test_reads_that_do_not_end_leave_threads_for_other_sources(backend: NixlBackend) -> None:
    agent = backend._agent
    begun = [_begun(backend, agent) for _ in range(in_place.MOST_AT_A_SOURCE)]
    with pytest.raises(TransferError, match="do not end"), backend._connected(b"metadata"):
        pass
    with backend._connected(b"another"):
        pass
    agent.state = "ERR"
    agent.over.set()
    for thread, errors in begun:
        thread.join(30)
        assert len(errors) == 1
    [remote, _] = backend._remotes.values()
    assert remote.broken and not remote.reads
