"""Floods by a tenant who has a key, next to others: what one request may cost."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable, Iterator
from functools import cache

from floods.flood import KEY, Flood
from floods.wire import GENERATE, GREETING, call, call_block, call_headers, message, streams
from h2.settings import SettingCodes

from sapwood.v1 import common_pb2, router_pb2
from sapwood_net.http2.wire import frames

_MOST = 16 * 1024 * 1024 - 1024
_NO_WINDOW = frames.settings([(SettingCodes.INITIAL_WINDOW_SIZE, 0)])


def bodies(make: Callable[[], bytes], path: bytes = b"/v1/completions") -> Callable[[int], Iterator[bytes]]:
    """The same body again and again, of a request each; made only once it is sent, since all together take seconds."""
    head = b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
    kept = cache(make)
    return lambda _: itertools.repeat(head % (KEY, len(kept())) + kept())


def _of_prompt(value: bytes) -> bytes:
    return b'{"model": "mock", "max_tokens": 1, "prompt": %b}' % value


def _continued(prompt: bytes) -> bytes:
    return b'{"model": "mock", "max_tokens": 1, "n": 128, "prompt": %b}' % prompt


def _prompts(text: bytes, more: bytes = b"") -> bytes:
    """As many as a request may have choices, each different."""
    prompts = b", ".join(b'"%d %b"' % (number, text) for number in range(1024))
    return b'{"model": "mock", "max_tokens": 1, "prompt": [%b]%b}' % (prompts, more)


def _keys() -> bytes:
    return b'{"model": "mock", "prompt": "a", %b}' % b", ".join(b'"k%d": 1' % number for number in range(1_000_000))


def _calls(make: Callable[[], bytes]) -> Callable[[int], Iterator[bytes]]:
    """One message, compressed, of each call."""
    block = call_block(GENERATE, ("authorization", f"Bearer {KEY.decode()}"), ("grpc-encoding", "gzip"))

    kept = cache(lambda: gzip.compress(make()))

    def chunks(_: int) -> Iterator[bytes]:
        packed = kept()
        body = b"\1" + len(packed).to_bytes(4, "big") + packed
        pieces = [body[at : at + frames.USUAL_FRAME] for at in range(0, len(body), frames.USUAL_FRAME)]
        yield GREETING
        for stream in streams():
            data = [frames.frame(frames.DATA, 0, stream, piece) for piece in pieces]
            yield b"".join((call_headers(stream, block), *data, frames.frame(frames.DATA, frames.END_STREAM, stream)))

    return chunks


def _chat(messages: int) -> bytes:
    said = b",".join([b'{"role": "user", "content": "a"}'] * messages)
    return b'{"model": "mock", "max_tokens": 1, "messages": [%b]}' % said


def _said() -> bytes:
    """14 MB of items that are one turn of a conversation."""
    return b",".join([b'{"role": "assistant", "content": "%b"}' % (b"a" * 850)] * 16_000)


def _texts() -> bytes:
    """14 MB of texts that are one message."""
    return b",".join([b'{"type": "text", "text": "%b"}' % (b"a" * 850)] * 16_000)


def _unread_streams(settings: bytes) -> Iterator[bytes]:
    """Long answers, of which none has room, or which nobody reads."""
    sampling = common_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    request = router_pb2.RouterGenerateRequest(text="a", sampling=sampling).SerializeToString()
    block = call_block(GENERATE, ("authorization", f"Bearer {KEY.decode()}"))
    yield frames.PREFACE + settings
    for stream in streams():
        yield call(stream, block, request)


def _chats(_: int) -> Iterator[bytes]:
    """Messages of 55 KB, each of 5000 turns."""
    said = router_pb2.RouterGenerateRequest(sampling=common_pb2.SamplingParams(max_tokens=1))
    said.messages.messages.extend([common_pb2.ChatMessage(role="user", content="a")] * 5000)
    request, block = said.SerializeToString(), call_block(GENERATE, ("authorization", f"Bearer {KEY.decode()}"))
    body = message(request)
    pieces = [body[at : at + frames.USUAL_FRAME] for at in range(0, len(body), frames.USUAL_FRAME)]
    yield GREETING
    for stream in streams():
        data = [frames.frame(frames.DATA, 0, stream, piece) for piece in pieces]
        yield b"".join((call_headers(stream, block), *data, frames.frame(frames.DATA, frames.END_STREAM, stream)))


def _with_stops() -> bytes:
    stops = b"\x3a\0" * (_MOST // 2)  # `stop` is field 7, each of them empty
    return router_pb2.RouterGenerateRequest(text="a").SerializeToString() + stops


KEYED_FLOODS = (
    Flood("nested JSON", "http", bodies(lambda: _of_prompt(b"[" * 100_000 + b"]" * 100_000)), keyed=True),
    Flood("JSON of a million keys", "http", bodies(_keys), keyed=True),
    Flood(
        "JSON of a million stops",
        "http",
        bodies(lambda: _of_prompt(b'"a", "stop": [%b]' % b",".join([b'"a"'] * 1_000_000))),
        keyed=True,
    ),
    Flood(
        "JSON of five million objects",
        "http",
        bodies(lambda: _of_prompt(b"[%b]" % b",".join([b"{}"] * 5_000_000))),
        keyed=True,
    ),
    Flood(
        "JSON numbers of a megabyte",
        "http",
        bodies(lambda: _of_prompt(b'"a", "seed": %b' % (b"9" * 1_000_000))),
        keyed=True,
    ),
    Flood("prompts of 8 MB", "http", bodies(lambda: _of_prompt(b'"%b"' % (b"a " * 4_000_000))), keyed=True),
    Flood(
        "prompts of too many numbers",
        "http",
        bodies(lambda: _of_prompt(b"[%b]" % b",".join([b"7"] * 1_200_000))),
        keyed=True,
    ),
    Flood("prompts of 15 MB", "http", bodies(lambda: _of_prompt(b'"%b"' % (b"a " * 7_500_000))), keyed=True),
    Flood(
        "200 000 tokens continued 128 times",
        "http",
        bodies(lambda: _continued(b"[%b]" % b",".join([b"7"] * 200_000))),
        keyed=True,
    ),
    Flood("100 KB continued 128 times", "http", bodies(lambda: _continued(b'"%b"' % (b"a " * 50_000))), keyed=True),
    Flood(
        "long answers unread",
        "http",
        bodies(lambda: _of_prompt(b'"%b", "echo": true' % (b"a " * 1_500_000))),
        keyed=True,
        reads=False,
    ),
    Flood(
        "streams unread",
        "http",
        bodies(lambda: b'{"model": "mock", "max_tokens": 2000, "stream": true, "prompt": "a"}'),
        keyed=True,
        reads=False,
        times=30,
    ),
    Flood("answers continued 128 times", "http", bodies(lambda: _continued(b'"a"')), keyed=True),
    Flood("1024 prompts", "http", bodies(lambda: _prompts(b"a")), keyed=True),
    Flood("1024 prompts of 4 KB", "http", bodies(lambda: _prompts(b"a " * 2000)), keyed=True),
    Flood("1024 prompts streamed", "http", bodies(lambda: _prompts(b"a", b', "stream": true')), keyed=True),
    Flood("chats over gRPC of 5000 messages", "grpc", _chats, keyed=True),
    Flood("chats of 7000 messages", "http", bodies(lambda: _chat(7000), b"/v1/chat/completions"), keyed=True),
    Flood(
        "answers of 60 000 choices",
        "http",
        bodies(lambda: _of_prompt(b'"a", "guided_choice": [%b]' % b",".join([b'"a"'] * 60_000))),
        keyed=True,
    ),
    Flood(
        "16 000 texts of one turn",
        "http",
        bodies(lambda: b'{"model": "mock", "max_output_tokens": 1, "input": [%b]}' % _said(), b"/v1/responses"),
        keyed=True,
    ),
    Flood(
        "16 000 texts of one message",
        "http",
        bodies(
            lambda: b'{"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": [%b]}]}' % _texts(),
            b"/v1/messages",
        ),
        keyed=True,
    ),
    Flood(
        "a million tokens to make text of",
        "http",
        bodies(lambda: b'{"model": "mock", "tokens": [%b]}' % b",".join([b"7"] * 1_000_000), b"/detokenize"),
        keyed=True,
    ),
    Flood(
        "60 000 documents",
        "http",
        bodies(
            lambda: b'{"model": "mock", "query": "a", "documents": [%b]}' % b",".join([b'"a"'] * 60_000), b"/v1/rerank"
        ),
        keyed=True,
    ),
    Flood("streams over windows of zero", "grpc", lambda _: _unread_streams(_NO_WINDOW), keyed=True),
    Flood("streams over gRPC unread", "grpc", lambda _: _unread_streams(frames.settings([])), keyed=True, reads=False),
    Flood("gzip bombs with a key", "grpc", _calls(lambda: bytes(_MOST)), keyed=True),
    Flood("gzip bombs of a million stops", "grpc", _calls(_with_stops), keyed=True),
)
