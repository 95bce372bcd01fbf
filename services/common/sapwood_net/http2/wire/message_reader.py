"""Cuts gRPC's messages out of a stream's data. Each is a byte (1 if compressed), four bytes of length, and the message."""

from __future__ import annotations

PREFIX = 5
"""Bytes before each message."""


class MessageReader:
    """Reads the messages of one stream, in time linear in their length. Held is at most the beginning of one.

    Args:
        most_bytes: The largest message taken.

    Attributes:
        most_bytes: The largest message taken.
        pending: The beginning of a message whose end has not come. Not to be changed.
        refused: Bytes of a message that was too large; later data is dropped. None: there was none.
    """

    __slots__ = ("most_bytes", "pending", "refused")

    def __init__(self, most_bytes: int) -> None:
        self.pending = bytearray()
        self.refused: int | None = None
        self.most_bytes = most_bytes

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """The messages that ``data`` completes, each with whether it is compressed."""
        if self.refused is not None:
            return []
        inbound: bytes | bytearray = data
        at, length = 0, len(data)
        if self.pending:
            inbound = self.pending
            inbound += data
            length = len(inbound)
        elif PREFIX <= length <= self.most_bytes and int.from_bytes(data[1:PREFIX], "big") == length - PREFIX:
            return [(data[PREFIX:], data[0] != 0)]  # the usual case: exactly one message
        found: list[tuple[bytes, bool]] = []
        while length - at >= PREFIX:
            size = int.from_bytes(inbound[at + 1 : at + PREFIX], "big")
            if size > self.most_bytes:
                self.refused = size
                self.pending = bytearray()
                return found
            end = at + PREFIX + size
            if end > length:
                break
            message = data[at + PREFIX : end] if inbound is data else bytes(memoryview(inbound)[at + PREFIX : end])
            found.append((message, inbound[at] != 0))
            at = end
        if inbound is not data:
            del self.pending[:at]
        elif at < length:
            self.pending += data[at:]
        return found

    def clear(self) -> None:
        """Drops what is held."""
        self.pending = bytearray()


def prefixed(message: bytes) -> bytes:
    """A message with its prefix, not compressed."""
    return b"\0%b%b" % (len(message).to_bytes(4, "big"), message)
