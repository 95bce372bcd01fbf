"""How a connection begins: what the server says first, and whether the client speaks HTTP/2 at all (RFC 9113, 3.4)."""

from __future__ import annotations

from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_common.http2.server.stream import WINDOW
from sapwood_common.http2.wire import frames
from sapwood_common.http2.wire.frames import ConnectionFailedError
from sapwood_common.http2.wire.header_reader import MOST_HEADER_BYTES

CONNECTION_WINDOW = 16 * 1024 * 1024
"""Bytes that a client may send on all streams together before it is told that they were taken."""
_WRONG_PROTOCOL = b"this port speaks gRPC over HTTP/2\n"


class WrongProtocolError(Exception):
    """The client speaks something else. ``answer`` says so in its protocol; empty if that is unknown."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("the client does not speak HTTP/2")
        self.answer = answer


def server_greeting(most_streams: int) -> bytes:
    """The server's settings and its window; ``most_streams`` is how many streams the client may have open."""
    settings = (
        (SettingCodes.MAX_CONCURRENT_STREAMS, most_streams),
        (SettingCodes.INITIAL_WINDOW_SIZE, WINDOW),
        (SettingCodes.MAX_HEADER_LIST_SIZE, MOST_HEADER_BYTES),
    )
    return frames.settings(settings) + frames.window_update(0, CONNECTION_WINDOW - frames.USUAL_WINDOW)


class Greeting:
    """Waits for the client's preface.

    Attributes:
        over: Whether it has come.
    """

    __slots__ = ("_received", "over")

    def __init__(self) -> None:
        self.over = False
        self._received = b""

    def take(self, data: bytes) -> bytes:
        """Takes what has come. Returns the frames after the preface; nothing before the head of the first one is here.

        Raises:
            WrongProtocolError: The client does not speak HTTP/2.
            ConnectionFailedError: The first frame is not SETTINGS.
        """
        received = self._received = self._received + data
        if not received.startswith(frames.PREFACE[: len(received)]):
            answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            raise WrongProtocolError(
                answer % (len(_WRONG_PROTOCOL), _WRONG_PROTOCOL) if b"HTTP/1." in received else b""
            )
        start = len(frames.PREFACE)
        if len(received) < start + frames.HEADER:
            return b""
        self._received = b""
        self.over = True
        if received[start + 3] != frames.SETTINGS or received[start + 4] & frames.ACK:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        return received[start:]
