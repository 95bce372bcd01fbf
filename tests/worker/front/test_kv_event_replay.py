"""The ports of KV events: who may read them, and what a flood of questions does."""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from sapwood_common.errors import ConfigError
from sapwood_worker.app import is_loopback
from sapwood_worker.config import WorkerConfig
from sapwood_worker.front import kv_event_publisher
from sapwood_worker.front.kv_event_publisher import END_OF_REPLAY, KvEventPublisher
from sapwood_worker.front.kv_event_stream import KvEventBatch
from sapwood_worker.records.kv_events import BlockStored

FIRST, PATIENCE = bytes(8), 60_000


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key_folder for --kv-events, and the keys of a stranger."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "clients").mkdir()
    zmq.auth.create_certificates(folder, "server")
    zmq.auth.create_certificates(folder, "stranger")
    zmq.auth.create_certificates(folder, "known")
    (folder / "known.key").rename(folder / "clients" / "known.key")
    return folder


@contextlib.contextmanager
def published(count: int, keys: Path | None = None) -> Iterator[KvEventPublisher]:
    """A publisher that has published so many batches."""
    publisher = KvEventPublisher("127.0.0.1", 0, 0, topic="t", keep=10_000, block_size=2, keys=keys)
    try:
        for seq in range(1, count + 1):
            event = BlockStored(seq.to_bytes(16, "big"), b"", array("I", [seq, 7]).tobytes())
            publisher.publish(KvEventBatch(1, seq, 0, [event]))
        yield publisher
    finally:
        publisher.close()


@contextlib.contextmanager
def connected(kind: int, address: str | None, curve: tuple[Path, str] | None = None) -> Iterator[Any]:
    """A socket of a subscriber, with keys of a folder."""
    with zmq.Context() as context, context.socket(kind) as subscriber:
        subscriber.linger = 0
        if curve is not None:
            folder, name = curve
            subscriber.curve_publickey, subscriber.curve_secretkey = zmq.auth.load_certificate(
                folder / f"{name}.key_secret"
            )
            subscriber.curve_serverkey, _ = zmq.auth.load_certificate(folder / "server.key")
        if address is not None:
            subscriber.connect(f"tcp://{address}")
        yield subscriber


def ask(socket: Any, first: bytes = FIRST) -> None:
    socket.send_multipart((b"", first))


def answer(socket: Any) -> list[int]:
    """The numbers of the batches of one answer."""
    found = []
    while True:
        assert socket.poll(PATIENCE), "no answer"
        *_, number, payload = socket.recv_multipart()
        if number == END_OF_REPLAY:
            return found
        assert payload
        found.append(int.from_bytes(number, "big"))


@pytest.mark.parametrize("name", ["stranger", None])
def test_tokens_go_only_to_those_whose_keys_are_known(keys: Path, name: str | None) -> None:
    with published(5, keys) as publisher:
        curve = None if name is None else (keys, name)
        with (
            connected(zmq.DEALER, publisher.replay_address, (keys, "known")) as known,
            connected(zmq.SUB, publisher.address, (keys, "known")) as subscriber,
            connected(zmq.DEALER, publisher.replay_address, curve) as stranger,
            connected(zmq.SUB, publisher.address, curve) as listener,
        ):
            for socket in (subscriber, listener):
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            with contextlib.suppress(zmq.Again):  # a connection that was refused takes no more
                stranger.send_multipart((b"", FIRST), zmq.NOBLOCK)
            ask(known)
            assert answer(known) == [1, 2, 3, 4, 5]
            seq = 5
            while not subscriber.poll(50):  # until the subscription has arrived
                seq += 1
                publisher.publish(KvEventBatch(1, seq, 0, [BlockStored(bytes(16), b"", bytes(8))]))
            assert not stranger.poll(200)
            assert not listener.poll(0)


def test_a_flood_of_replay_requests_keeps_nobody_from_an_answer() -> None:
    with (
        published(300) as publisher,
        connected(zmq.DEALER, publisher.replay_address) as flooding,
        connected(zmq.DEALER, publisher.replay_address) as other,
    ):
        for _ in range(5000):
            ask(flooding)
        ask(other, (300).to_bytes(8, "big"))
        assert answer(other) == [300]
        seq = 301
        publisher.publish(KvEventBatch(1, seq, 0, [BlockStored(bytes(16), b"", bytes(8))]))
        ask(other, seq.to_bytes(8, "big"))
        assert answer(other) == [seq]
        answers = 0
        while flooding.poll(1000):
            answers += flooding.recv_multipart()[-2] == END_OF_REPLAY
        assert answers < 500, "its connection is closed, or it is answered once more"


def test_a_subscriber_that_reads_late_gets_all_of_a_long_answer() -> None:
    with published(9000) as publisher, connected(zmq.DEALER, publisher.replay_address) as slow:
        slow.rcvhwm = 10
        ask(slow)
        threading.Event().wait(0.3)
        assert answer(slow) == list(range(1, 9001))


def test_what_is_no_question_is_left_alone_and_long_frames_close_their_connection() -> None:
    with published(3) as publisher:
        with connected(zmq.DEALER, publisher.replay_address) as odd:
            for frames in ((b"",), (b"", b"seven77"), (b"", b"nine99999"), (b"",) * 50):
                odd.send_multipart(frames)
            odd.send_multipart((b"", b"x" * 10_000))
            assert not odd.poll(100)
        with connected(zmq.DEALER, publisher.replay_address) as good:
            ask(good, (2).to_bytes(8, "big"))
            assert answer(good) == [2, 3]


def test_frames_of_a_question_are_taken_a_few_in_a_turn() -> None:
    """64 questions of 5000 frames each were one piece of work, in which other requests of the worker waited."""

    class Counted:
        """A socket that has questions of many frames, without an end."""

        def __init__(self) -> None:
            self.taken = 0

        def setsockopt(self, *_: int) -> None:
            """As it is."""

        def recv(self, _: int = 0) -> bytes:
            self.taken += 1
            return b"client" if self.taken % 5000 == 1 else bytes(8)

        @property
        def rcvmore(self) -> bool:
            return self.taken % 5000 > 0

    server = kv_event_publisher.ReplayServer(socket := Counted(), tuple, ())
    for turn in range(1, 100):
        server._take_questions()
        assert socket.taken == turn * kv_event_publisher._FRAMES
    assert server._waiting == {b"client": 0}


def test_a_question_of_thousands_of_frames_is_answered_if_its_last_is_one() -> None:
    with published(3) as publisher, connected(zmq.DEALER, publisher.replay_address) as asking:
        asking.send_multipart((*(b"",) * 5000, (2).to_bytes(8, "big")))
        assert answer(asking) == [2, 3]


def test_a_subscriber_that_leaves_in_the_middle_is_forgotten() -> None:
    with published(9000) as publisher:
        for _ in range(20):
            with connected(zmq.DEALER, publisher.replay_address) as leaving:
                ask(leaving)
                assert leaving.poll(PATIENCE)
        with connected(zmq.DEALER, publisher.replay_address) as staying:
            ask(staying, (8999).to_bytes(8, "big"))
            assert answer(staying) == [8999, 9000]


def test_a_folder_that_lacks_keys_is_named(tmp_path: Path, keys: Path) -> None:
    (tmp_path / "clients").mkdir()
    with pytest.raises(ConfigError, match="--kv-events key_folder"), published(0, tmp_path):
        pass
    zmq.auth.create_certificates(tmp_path, "server")
    with pytest.raises(ConfigError, match="public keys in clients"), published(0, tmp_path):
        pass


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False), ("w0", False)],
)
def test_only_loopback_needs_no_warning(host: str, own: bool) -> None:
    assert is_loopback(host) is own
    assert WorkerConfig(kv_events_port=0).kv_events.host is None


def test_subscribers_that_do_not_read_keep_nobody_from_an_answer() -> None:
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(published(0))
        event = BlockStored(bytes(16), b"", bytes(4 * 5000))
        for seq in range(1, 3001):
            publisher.publish(KvEventBatch(1, seq, 0, [event]))
        for _ in range(20):
            slow = stack.enter_context(connected(zmq.DEALER, None))
            slow.setsockopt(zmq.RCVHWM, 1)
            slow.connect(f"tcp://{publisher.replay_address}")
            ask(slow)
        reading = stack.enter_context(connected(zmq.DEALER, publisher.replay_address))
        ask(reading, (2990).to_bytes(8, "big"))
        assert answer(reading) == list(range(2990, 3001))


def test_a_subscriber_that_asks_for_too_much_is_closed_and_delays_no_event() -> None:
    with (
        published(0) as publisher,
        connected(zmq.SUB, publisher.address) as flooding,
        connected(zmq.SUB, publisher.address) as other,
    ):
        closed = flooding.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        other.subscribe(b"")
        flooding.setsockopt(zmq.RECONNECT_IVL, -1)
        for number in range(2000):
            flooding.subscribe(b"%1000d" % number)
        assert closed.poll(PATIENCE), "its connection stays"
        seq = 0
        while not other.poll(50):  # until the subscription has arrived
            seq += 1
            publisher.publish(KvEventBatch(1, seq, 0, [BlockStored(bytes(16), b"", bytes(8))]))
        assert other.recv_multipart()[0] == b"t"
        flooding.disable_monitor()
        closed.close()


def test_of_many_subscribers_of_one_address_the_oldest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_publisher, "MOST_SUBSCRIBERS", 2)
    with published(0) as publisher, contextlib.ExitStack() as stack:
        host, _, port = publisher.address.rpartition(":")
        first, *_ = (stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(3))
        first.settimeout(PATIENCE / 1000)
        with contextlib.suppress(ConnectionResetError):
            while first.recv(4096):
                pass


def test_an_address_has_a_few_connections_for_replays_and_the_oldest_leaves() -> None:
    with published(3) as publisher, contextlib.ExitStack() as stack:
        assert publisher.replay_address is not None
        host, _, port = publisher.replay_address.rpartition(":")
        number = kv_event_publisher.MOST_REPLAYS + 1
        first, second, *_ = (stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(number))
        first.settimeout(PATIENCE / 1000)
        with contextlib.suppress(ConnectionResetError):
            while first.recv(4096):
                pass
        second.sendall(b"\xff" + bytes(8) + b"\x7f")  # it is still there
        with connected(zmq.DEALER, publisher.replay_address) as asking:
            ask(asking)
            assert answer(asking) == [1, 2, 3]


def test_a_subscriber_that_asks_without_end_is_closed() -> None:
    with published(3) as publisher, connected(zmq.DEALER, publisher.replay_address) as asking:
        closed = asking.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        asking.setsockopt(zmq.RECONNECT_IVL, -1)
        for _ in range(PATIENCE):  # at most a thousand messages wait for the connection
            for _ in range(kv_event_publisher.MOST_SAID // 16):
                with contextlib.suppress(zmq.Again):
                    asking.send_multipart((b"", FIRST), zmq.NOBLOCK)
            if closed.poll(1):
                break
        else:
            pytest.fail("its connection stays")
        asking.disable_monitor()
        closed.close()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o600])
def test_a_servers_secret_that_others_may_read_is_warned_of(
    keys: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    (keys / "server.key_secret").chmod(mode)
    with published(0, keys):
        assert ("chmod 600" in caplog.text) == (mode != 0o600)
