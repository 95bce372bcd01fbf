"""The settings of the other end of a connection, as far as they matter for sending messages."""

from __future__ import annotations

from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from sapwood_net.http2.wire import frames
from sapwood_net.http2.wire.frames import ConnectionFailedError

_LARGEST_SENT = 4 * frames.USUAL_FRAME
"""The most bytes of a frame's payload, even if the peer takes more: streams take turns by frames."""


class PeerSettings:
    """The settings in force.

    Attributes:
        stream_window: Bytes that the peer takes of a new stream.
        frame_size: The largest payload to send it.
    """

    __slots__ = ("frame_size", "stream_window")

    def __init__(self) -> None:
        self.stream_window = frames.USUAL_WINDOW
        self.frame_size = frames.USUAL_FRAME

    def take(self, stream: int, flags: int, payload: bytes) -> bool:
        """Takes a SETTINGS frame; returns whether it is to be acknowledged.

        Streams that are open have as much more room as ``stream_window`` has grown by.

        Raises:
            ConnectionFailedError: It is malformed.
        """
        if stream:
            raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (payload and flags & frames.ACK):
            raise ConnectionFailedError(ErrorCodes.FRAME_SIZE_ERROR, "settings of another size")
        for key, value in frames.parse_settings(payload):
            if key == SettingCodes.INITIAL_WINDOW_SIZE:
                if value > frames.LARGEST_WINDOW:
                    raise ConnectionFailedError(ErrorCodes.FLOW_CONTROL_ERROR, "a window too large")
                self.stream_window = value
            elif key == SettingCodes.MAX_FRAME_SIZE:
                if not frames.USUAL_FRAME <= value <= frames.LARGEST_FRAME:
                    raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "a frame size that there is not")
                self.frame_size = min(value, _LARGEST_SENT)
            elif key == SettingCodes.ENABLE_PUSH and value > 1:
                raise ConnectionFailedError(ErrorCodes.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        return not flags & frames.ACK
