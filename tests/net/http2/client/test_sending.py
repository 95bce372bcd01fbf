"""A connection is stuck when the kernel sends the same bytes again and none is acknowledged, and only then."""

from __future__ import annotations

import socket
import sys

import pytest

from sapwood_net.http2.client.sending import STUCK_AFTER, Sending

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's tcp_info is asked")
INTERVAL = 0.1


class Kernel:
    """A socket of which the test says what the kernel knows."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.probes = self.retransmits = self.unacknowledged = self.acknowledged = 0
        self.unsent, self.room = 0, 60_000

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        info = bytearray(size)
        info[3] = self.probes
        info[100:104] = self.retransmits.to_bytes(4, sys.byteorder)
        info[24:28] = self.unacknowledged.to_bytes(4, sys.byteorder)
        info[16:20] = (1448).to_bytes(4, sys.byteorder)
        info[144:148] = self.unsent.to_bytes(4, sys.byteorder)
        info[228:232] = self.room.to_bytes(4, sys.byteorder)
        info[120:128] = self.acknowledged.to_bytes(8, sys.byteorder)
        return bytes(info)


class Watched:
    """A connection that is checked every tenth of a second."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.now = 0.0
        self.sending = Sending(self.kernel, INTERVAL, lambda: self.now)

    def pass_by(self, seconds: float) -> float:
        found = 0.0
        for _ in range(round(seconds / INTERVAL)):
            self.now += INTERVAL
            found = self.sending.check()
        return found


def test_bytes_that_are_sent_again_and_never_acknowledged_are_stuck() -> None:
    watched = Watched()
    watched.kernel.unacknowledged, watched.kernel.acknowledged = 3, 1000
    assert watched.pass_by(0.2) == 0.0
    watched.kernel.retransmits = 1
    assert watched.pass_by(0.5) < STUCK_AFTER
    assert watched.pass_by(1.5) >= STUCK_AFTER


def test_a_slow_path_that_acknowledges_is_not_stuck() -> None:
    watched = Watched()
    watched.kernel.unacknowledged, watched.kernel.retransmits = 3, 1
    for _ in range(20):
        watched.kernel.acknowledged += 100
        watched.kernel.retransmits += 1
        assert watched.pass_by(1.0) < STUCK_AFTER


def test_a_peer_that_reads_nothing_is_not_stuck_as_its_kernel_answers() -> None:
    watched = Watched()
    watched.kernel.unacknowledged = 1
    assert watched.pass_by(60.0) == 0.0
    watched.kernel.retransmits, watched.kernel.probes = 1, 3
    assert watched.pass_by(60.0) == 0.0


def test_bytes_that_this_machine_itself_fails_to_send_are_stuck() -> None:
    watched = Watched()
    watched.kernel.unsent, watched.kernel.probes = 500, 3
    assert watched.pass_by(0.5) < STUCK_AFTER
    assert watched.sending.open
    assert watched.pass_by(1.5) >= STUCK_AFTER


@pytest.mark.parametrize(("room", "probes"), [(0, 200), (1000, 200), (60_000, 1)])
def test_bytes_that_wait_for_room_or_for_answered_probes_are_not_stuck(room: int, probes: int) -> None:
    watched = Watched()
    watched.kernel.unsent, watched.kernel.probes, watched.kernel.room = 500, probes, room
    assert watched.pass_by(60.0) == 0.0


def test_a_check_that_comes_late_does_not_count_the_time_in_which_nobody_looked() -> None:
    watched = Watched()
    watched.kernel.unacknowledged = 3
    watched.pass_by(0.1)
    watched.kernel.retransmits = 1
    watched.pass_by(0.4)
    watched.now += 60.0
    assert watched.sending.check() < STUCK_AFTER


def test_a_real_connection_and_what_is_no_tcp_are_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        sending = Sending(client, INTERVAL, lambda: 0.0)
        client.send(b"abc")
        assert sending.check() == 0.0
    assert sending.check() == 0.0, "closed"
    assert Sending(None, INTERVAL, lambda: 0.0).check() == 0.0
    one, other = socket.socketpair()
    with one, other:
        assert Sending(one, INTERVAL, lambda: 0.0).check() == 0.0


def test_large_packets_have_arrived_when_the_kernel_counts_them_acknowledged() -> None:
    watched = Watched()
    assert not watched.sending.has_arrived(16_384), "nothing was written yet, so nothing is unacknowledged either"
    watched.kernel.acknowledged = 300
    watched.pass_by(0.2)
    assert not watched.sending.has_arrived(16_384)
    watched.kernel.acknowledged = 16_700
    watched.pass_by(0.1)
    assert watched.sending.has_arrived(16_384)


def test_a_socket_without_counts_has_let_all_arrive() -> None:
    assert Sending(None, INTERVAL, lambda: 0.0).has_arrived(16_384)
