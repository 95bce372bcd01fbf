"""Connections begin in an order in which no address keeps the others waiting."""

from __future__ import annotations

import socket

import pytest

from sapwood_net.sockets.newcomers import _FAIR, Newcomers, source


@pytest.fixture
def make():
    made: list[socket.socket] = []

    def make(count: int) -> list[socket.socket]:
        new = [socket.socket() for _ in range(count)]
        made.extend(new)
        return new

    yield make
    for each in made:
        each.close()


def test_few_of_an_address_begin_in_their_order_and_of_many_the_newest_first(make) -> None:
    line, connections = Newcomers(1000), make(_FAIR + 20)
    for each in connections:
        assert line.add(each, "a") is None
    order = [line.pop() for _ in connections]
    assert order == [*reversed(connections[_FAIR:]), *connections[:_FAIR]]
    assert not line


def test_another_address_is_served_before_a_thousand_connections_of_one(make) -> None:
    line, strangers, others = Newcomers(1000), make(100), make(3)
    for each in strangers:
        line.add(each, "stranger")
    line.pop()
    for each in others:
        line.add(each, "other")
    order = [line.pop() for _ in range(6)]
    assert [each in others for each in order] == [True, False, True, False, True, False]
    assert [each for each in order if each in others] == others


def test_the_latest_address_has_the_next_turn_however_many_there_are(make) -> None:
    line, connections = Newcomers(1000), make(50)
    for number, each in enumerate(connections):
        line.add(each, str(number))
    assert line.pop() is connections[-1]


def test_beyond_the_most_the_oldest_of_the_largest_address_goes(make) -> None:
    line, strangers, (other,) = Newcomers(10), make(12), make(1)
    assert [line.add(each, "stranger") for each in strangers] == [None] * 10 + strangers[:2]
    assert line.add(other, "other") is strangers[2]
    assert line.pop() is other
    assert len(line) == 9


@pytest.mark.parametrize(
    ("one", "another", "same"),
    [
        (("10.0.0.1", 5), ("10.0.0.1", 6), True),
        (("10.0.0.1", 5), ("10.0.0.2", 5), False),
        (("2001:db8:1:2::1", 5, 0, 0), ("2001:db8:1:2:ffff::9", 6, 0, 0), True),
        (("2001:db8:1:2::1", 5, 0, 0), ("2001:db8:1:3::1", 5, 0, 0), False),
        (("::ffff:10.0.0.1", 5, 0, 0), ("::ffff:10.0.0.2", 5, 0, 0), False),
        (("fe80::1%eth0", 5, 0, 1), ("fe80::2%eth0", 5, 0, 1), True),
        ("", "", True),
    ],
)
def test_an_address_of_ipv4_and_a_network_of_ipv6_count_as_one(one, another, same) -> None:
    assert (source(one) == source(another)) is same
