"""Header fields that are checked all at once are judged as by a check of each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_net.http2.wire.request_head import RequestHead, find_trailer_problem

WELL = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b"te", b"trailers")]
NAMES = st.one_of(
    st.sampled_from(
        [
            b":method",
            b":scheme",
            b":path",
            b":authority",
            b":status",
            b"te",
            b"host",
            b"x-a",
            b"content-length",
            b"upgrade",
        ]
    ),
    st.binary(max_size=3),
    st.text("aZ:,\n -", max_size=4).map(str.encode),
)
VALUES = st.one_of(
    st.sampled_from([b"POST", b"CONNECT", b"/", b"*", b"trailers", b"5", b"x", b""]),
    st.text("a \t\r\n\0", max_size=3).map(str.encode),
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=4)
TOKEN = set(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
HOP = (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")


def field_is_well(name: bytes, value: bytes) -> bool:
    if not name or not set(name) <= TOKEN or set(value) & set(b"\0\r\n") or value != value.strip(b" \t"):
        return False
    return name not in HOP and (name != b"te" or value == b"trailers")


def is_well(fields: list[tuple[bytes, bytes]]) -> bool:
    """RFC 9113, 8.2 and 8.3, a field at a time."""
    at = 0
    while at < len(fields) and fields[at][0].startswith(b":"):
        at += 1
    pseudo = dict(fields[:at])
    if len(pseudo) < at or not pseudo.keys() <= {b":method", b":scheme", b":path", b":authority"}:
        return False
    if not all(field_is_well(b"x", value) for value in pseudo.values()):
        return False
    if not all(field_is_well(name, value) for name, value in fields[at:]):
        return False
    lengths = {value for name, value in fields if name == b"content-length"}
    if len(lengths) > 1 or not all(value.isdigit() for value in lengths):
        return False
    hosts = [value for name, value in fields if name == b"host"]
    if hosts and hosts[-1].lower() != pseudo.get(b":authority", hosts[-1]).lower():
        return False
    if pseudo.get(b":method") == b"CONNECT":
        return pseudo.keys() == {b":method", b":authority"}
    if not all(pseudo.get(name) for name in (b":method", b":scheme", b":path")):
        return False
    return pseudo[b":path"].startswith(b"/") or (pseudo[b":path"] == b"*" and pseudo[b":method"] == b"OPTIONS")


@settings(deadline=None, max_examples=500)
@given(st.booleans(), FIELDS, st.randoms(use_true_random=False))
def test_requests(well, more, random) -> None:
    fields = [*(WELL if well else []), *more]
    if random.random() < 0.2:
        random.shuffle(fields)
    head = RequestHead(fields)
    assert (head.problem is None) == is_well(fields), head.problem


@settings(deadline=None, max_examples=200)
@given(FIELDS)
def test_trailers(fields) -> None:
    assert (find_trailer_problem(fields) is None) == all(field_is_well(name, value) for name, value in fields)


@pytest.mark.parametrize(("value", "length"), [(b"0", 0), (b"007", 7), (b"1" * 18, int("1" * 18))])
def test_the_content_length_is_told(value, length) -> None:
    assert RequestHead([*WELL, (b"content-length", value)]).content_length == length
    assert RequestHead(WELL).content_length is None
