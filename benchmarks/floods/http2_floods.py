"""Floods of the gRPC port by strangers: none has a key. Calls are for the health service where they shall be let in."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable, Iterator

import hpack
from floods.flood import Flood
from floods.wire import GENERATE, GREETING, HEALTH, REFLECTION, call, call_block, call_headers, message, streams
from h2.settings import SettingCodes

from sapwood_net.http2.wire import frames

_HEALTH = call_block(HEALTH)
_MANY = 16_000
"""Streams on a connection."""
_BATCH = 1000
"""Frames in a chunk."""
_HUGE = 16 * 1024 * 1024 - 1024
"""Bytes of a message that is still taken."""


def _again(greeting: bytes, chunk: bytes) -> Iterator[bytes]:
    yield greeting
    yield from itertools.repeat(chunk)


def _calls(block: bytes, after: Callable[[int], bytes] | None = None, first: int = 1) -> Iterator[bytes]:
    """Calls without a request, as fast as they come; after the head of each what ``after`` makes, else they end with it."""
    for start in itertools.count(first, 2 * _BATCH):
        parts = []
        for stream in range(start, start + 2 * _BATCH, 2):
            parts.append(call_headers(stream, block, end=after is None))
            if after is not None:
                parts.append(after(stream))
        yield b"".join(parts)


def _references(after: Callable[[int], bytes] | None, more: bytes = b"") -> Iterator[bytes]:
    """The same with blocks of references to fields of the first block, a few bytes each, and ``more`` after them."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", HEALTH), (":authority", "x"), ("te", "trailers")]
    fields.append(("content-type", "application/grpc"))
    yield GREETING + call_headers(1, hpack.Encoder().encode(fields, huffman=False), end=True)
    # POST and http are in the static table; path, authority, te and content-type entered the other in this order.
    yield from _calls(b"\x83\x86\xc1\xc0\xbf\xbe" + more, after, 3)


def _rapid_reset(_: int) -> Iterator[bytes]:
    return _references(lambda stream: frames.reset(stream, 8))


def _made_resets(_: int) -> Iterator[bytes]:
    """A window that grows by nothing is an error for which a stream is reset."""
    return _references(lambda stream: frames.window_update(stream, 0))


def _unknown_methods(_: int) -> Iterator[bytes]:
    yield GREETING
    yield from _calls(call_block("/no.such.Service/Method"))


def _no_key(_: int) -> Iterator[bytes]:
    yield GREETING
    yield from _calls(call_block(GENERATE, ("authorization", "Bearer wrong")))


def _health_calls(_: int) -> Iterator[bytes]:
    yield GREETING
    for start in itertools.count(1, 2 * _BATCH):
        yield b"".join(call(stream, _HEALTH, b"") for stream in range(start, start + 2 * _BATCH, 2))


def _idle_streams(_: int) -> Iterator[bytes]:
    yield GREETING + b"".join(call_headers(stream, _HEALTH) for stream in range(1, 2 * _MANY, 2))


def _windows_times_streams(number: int) -> Iterator[bytes]:
    yield from _idle_streams(number)
    up, down = (frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, size)]) for size in (2**20, 2**10))
    yield from itertools.repeat((up + down) * 100)


def _windows_times_answers(_: int) -> Iterator[bytes]:
    """Answers wait for the streams' windows, then for the connection's, which grows by one byte again and again."""
    yield GREETING + frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, 0)])
    yield b"".join(call(stream, _HEALTH, b"") for stream in range(1, 2 * _MANY, 2))
    updates = b"".join(frames.window_update(stream, 1) for stream in range(1, 2 * _MANY, 2))
    yield from itertools.repeat(updates + frames.window_update(0, 1) * 100)


def _one_byte_windows(_: int) -> Iterator[bytes]:
    """Each answer leaves in frames of one byte."""
    yield GREETING + frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, 0)])
    for start in itertools.count(1, 2 * _BATCH):
        some = range(start, start + 2 * _BATCH, 2)
        yield b"".join(call(stream, _HEALTH, b"") for stream in some)
        for _ in range(7):
            yield b"".join(frames.window_update(stream, 1) for stream in some)


def _half_messages(_: int) -> Iterator[bytes]:
    """Sixty messages of 16 MB, of which the last byte never comes."""
    yield GREETING
    block = call_block(GENERATE)
    yield b"".join(call_headers(2 * index + 1, block) for index in range(60))
    body = message(bytes(_HUGE))[:-1]
    for at in range(0, len(body), frames.USUAL_FRAME):
        piece = body[at : at + frames.USUAL_FRAME]
        yield b"".join(frames.frame(frames.DATA, 0, 2 * index + 1, piece) for index in range(60))


def _bombs(path: str) -> Iterator[bytes]:
    """Sixteen KB that become sixteen MB, unary and with a key's place empty."""
    block = call_block(path, ("grpc-encoding", "gzip"))
    packed = gzip.compress(bytes(_HUGE))
    body = b"\1" + len(packed).to_bytes(4, "big") + packed
    yield GREETING
    for stream in streams():
        data = [body[at : at + frames.USUAL_FRAME] for at in range(0, len(body), frames.USUAL_FRAME)]
        ends = [0] * (len(data) - 1) + [frames.END_STREAM]
        yield call_headers(stream, block) + b"".join(
            frames.frame(frames.DATA, flags, stream, piece) for piece, flags in zip(data, ends, strict=True)
        )


def _huge_metadata(_: int) -> Iterator[bytes]:
    """More header fields than are taken, in bytes that are sent."""
    block = _HEALTH + b"".join(frames.literal(b"k%d" % index, bytes(b"v" * 1000)) for index in range(70))
    yield GREETING
    for stream in streams():
        yield call_headers(stream, block, end=True)


def _references_bomb(_: int) -> Iterator[bytes]:
    """Blocks full of references to one field."""
    return _references(None, b"\xbe" * 1000)


def _huffman_bomb(_: int) -> Iterator[bytes]:
    """Blocks of tiny fields whose values are Huffman-coded."""
    return _references(None, b"\x0f\x2f\x81\x1f" * 1000)


def _table_churn(_: int) -> Iterator[bytes]:
    """Each block brings fields of 4 KB that enter the table, and drive out the last ones."""
    yield GREETING
    for stream in streams():
        fields = (b"\x40\x01a\x7f\xa1\x1e" + b"%4d" % (stream % 10_000) + bytes(b"v" * 3996) for _ in range(4))
        yield call_headers(stream, _HEALTH + b"".join(fields), end=True)


def _table_sizes(_: int) -> Iterator[bytes]:
    """Each block begins with sixteen thousand changes of the table's size."""
    yield GREETING
    for stream in streams():
        yield call_headers(stream, b"\x20" * 16_000 + _HEALTH, end=True)


def _many_fields(count: int) -> Callable[[int], Iterator[bytes]]:
    block = _HEALTH + b"".join(frames.literal(b"key-%d" % index, b"value") for index in range(count))

    def chunks(_: int) -> Iterator[bytes]:
        yield GREETING
        for stream in streams():
            yield call(stream, block, b"")

    return chunks


def _deadlines(_: int) -> Iterator[bytes]:
    """Calls that are late before they begin, and have no request."""
    yield GREETING
    yield from _calls(call_block(HEALTH, ("grpc-timeout", "1n")), lambda _: b"")


def _no_requests(_: int) -> Iterator[bytes]:
    yield GREETING
    yield from _calls(_HEALTH)


def _watches(_: int) -> Iterator[bytes]:
    """Calls that do not end by themselves, and are reset."""
    yield GREETING
    block = call_block("/grpc.health.v1.Health/Watch")
    for stream in streams():
        yield call(stream, block, b"") + (frames.reset(stream - 100, 8) if stream > 100 else b"")


def _held(path: str, request: bytes) -> Iterator[bytes]:
    """Calls that do not end by themselves, as many as are let in; the connections end all at once."""
    yield GREETING
    block = call_block(path)
    for stream in range(1, 20_000, 2):
        yield call_headers(stream, block) + frames.frame(frames.DATA, 0, stream, message(request))


def _trailers(_: int) -> Iterator[bytes]:
    """Fields behind a request, where gRPC has none."""
    block = b"".join(frames.literal(b"key-%d" % index, b"value") for index in range(200))
    yield GREETING
    for stream in streams():
        request = frames.frame(frames.DATA, 0, stream, message(b""))
        yield call_headers(stream, _HEALTH) + request + call_headers(stream, block, end=True)


def _reflection(_: int) -> Iterator[bytes]:
    """One call with a request after the other, each a few bytes, for what there is none of."""
    yield GREETING + frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, 2**31 - 1)])
    yield frames.window_update(0, 2**30) + call_headers(1, call_block(REFLECTION))
    request = message(b"\x22\x01a")  # the file that holds this symbol
    yield from itertools.repeat(frames.frame(frames.DATA, 0, 1, request * 500))


def _continuations(_: int) -> Iterator[bytes]:
    """A block in empty frames."""
    yield GREETING
    for stream in streams():
        yield frames.frame(frames.HEADERS, frames.END_STREAM, stream, _HEALTH)
        for _ in range(20):
            yield frames.frame(frames.CONTINUATION, 0, stream) * _BATCH
        yield frames.frame(frames.CONTINUATION, frames.END_HEADERS, stream)


def _open_then(chunk: bytes) -> Iterator[bytes]:
    """One call without an end, then the same again and again."""
    return _again(GREETING + call_headers(1, _HEALTH), chunk)


def _crumbs() -> Iterator[bytes]:
    """A message of a megabyte, a byte a frame; then the next."""
    yield GREETING
    for stream in streams():
        yield call_headers(stream, _HEALTH) + frames.frame(frames.DATA, 0, stream, message(bytes(1_000_000))[:5])
        yield from itertools.repeat(_same(frames.frame(frames.DATA, 0, stream, b"\0")), 1000)


def _connect(_: int) -> Iterator[bytes]:
    yield GREETING + call(1, _HEALTH, b"")


def _refused_at_once(_: int) -> Iterator[bytes]:
    """100 calls with a wrong key in one write: as many as are refused before the connection ends."""
    block = call_block(GENERATE, ("authorization", "Bearer wrong"))
    yield GREETING + b"".join(call_headers(stream, block) for stream in range(1, 201, 2))


def _same(frame: bytes) -> bytes:
    return frame * _BATCH


_PADDED = frames.frame(frames.DATA, frames.PADDED, 1, bytes((255,)) + bytes(255))
_TABLE_SIZES = frames.settings([(SettingCodes.HEADER_TABLE_SIZE, size) for size in (0, 4096, 65536, 0)])
_LONG_SETTINGS = frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, size) for size in range(2700)])

HTTP2_FLOODS = (
    Flood("streams and then windows up and down", "grpc", _windows_times_streams),
    Flood("windows over waiting answers", "grpc", _windows_times_answers),
    Flood("windows of one byte", "grpc", _one_byte_windows),
    Flood("rapid reset", "grpc", _rapid_reset),
    Flood("resets that we are made to send", "grpc", _made_resets),
    Flood("PING", "grpc", lambda _: _again(GREETING, _same(frames.frame(frames.PING, 0, 0, bytes(8))))),
    Flood(
        "PING with answers unread",
        "grpc",
        lambda _: _again(GREETING, _same(frames.frame(frames.PING, 0, 0, bytes(8)))),
        reads=False,
    ),
    Flood("empty SETTINGS", "grpc", lambda _: _again(GREETING, _same(frames.settings(())))),
    Flood("long SETTINGS", "grpc", lambda _: _again(GREETING, _LONG_SETTINGS * 10)),
    Flood("SETTINGS of table sizes", "grpc", lambda _: _again(GREETING, _same(_TABLE_SIZES))),
    Flood("PRIORITY", "grpc", lambda _: _again(GREETING, _same(frames.frame(frames.PRIORITY, 0, 1, bytes(5))))),
    Flood("unknown frames", "grpc", lambda _: _again(GREETING, _same(frames.frame(0xFA, 0, 0)))),
    Flood("unknown frames of 16 KB", "grpc", lambda _: _again(GREETING, frames.frame(0xFA, 0, 0, bytes(16_384)) * 16)),
    Flood("PRIORITY_UPDATE", "grpc", lambda _: _again(GREETING, _same(frames.frame(0x10, 0, 0, b"\0\0\0\1u=1")))),
    Flood("GOAWAY", "grpc", lambda _: _again(GREETING, _same(frames.frame(frames.GOAWAY, 0, 0, bytes(8))))),
    Flood("windows that overflow", "grpc", lambda _: _open_then(_same(frames.window_update(0, 2**31 - 1)))),
    Flood("WINDOW_UPDATE", "grpc", lambda _: _open_then(_same(frames.window_update(0, 1)))),
    Flood("WINDOW_UPDATE of a stream", "grpc", lambda _: _open_then(_same(frames.window_update(1, 1)))),
    Flood("empty DATA", "grpc", lambda _: _open_then(_same(frames.frame(frames.DATA, 0, 1)))),
    Flood("DATA of one byte", "grpc", lambda _: _crumbs()),
    Flood("padded DATA", "grpc", lambda _: _open_then(_same(_PADDED))),
    Flood("HPACK references", "grpc", _references_bomb),
    Flood("HPACK tiny Huffman fields", "grpc", _huffman_bomb),
    Flood("huge metadata", "grpc", _huge_metadata),
    Flood("HPACK table churn", "grpc", _table_churn),
    Flood("HPACK table sizes", "grpc", _table_sizes),
    Flood("metadata of 200 fields", "grpc", _many_fields(200)),
    Flood("metadata of 2000 fields", "grpc", _many_fields(2000)),
    Flood("CONTINUATION", "grpc", _continuations),
    Flood("unknown methods", "grpc", _unknown_methods),
    Flood("calls with a wrong key", "grpc", _no_key),
    Flood("health calls", "grpc", _health_calls),
    Flood("health calls without a request", "grpc", _no_requests),
    Flood("health calls that are late", "grpc", _deadlines),
    Flood("watches that are reset", "grpc", _watches),
    Flood("reflection", "grpc", _reflection),
    Flood("reflection with answers unread", "grpc", _reflection, reads=False),
    Flood("health calls with answers unread", "grpc", _health_calls, reads=False),
    Flood("half messages", "grpc", _half_messages),
    Flood("gzip bombs", "grpc", lambda _: _bombs(GENERATE)),
    Flood("gzip bombs to the health check", "grpc", lambda _: _bombs(HEALTH)),
    Flood("trailers of 200 fields", "grpc", _trailers),
    Flood(
        "answers to SETTINGS", "grpc", lambda _: _again(GREETING, _same(frames.frame(frames.SETTINGS, frames.ACK, 0)))
    ),
    Flood("watches that are held", "grpc", lambda _: _held("/grpc.health.v1.Health/Watch", b""), times=30),
    Flood("reflection that is held", "grpc", lambda _: _held(REFLECTION, b"\x22\x01a"), times=30),
    Flood("idle streams", "grpc", _idle_streams),
    Flood("new connections", "grpc", _connect, hang_up=0.0),
    Flood("calls with a wrong key on new connections", "grpc", _refused_at_once, hang_up=0.0),
    Flood("handshakes", "grpc", lambda _: iter((GREETING,)), hang_up=0.0),
)
