"""Where the records of TLS end, in what a client has sent, and whether there is enough in them."""

from __future__ import annotations

_HEAD = 5
"""Bytes of a record's type, version and length."""
_MOST_FRAMING, _FRAMING_PER_BYTE = 32 * 1024, 8
"""Bytes that a client may send beside the content, and as many more for each byte of content. A record has 22 beside its own:
small frames, each in a record, come to 2 a byte."""


class TlsRecords:
    """Follows the records of one connection, without a look at what is in them."""

    def __init__(self) -> None:
        self._head = b""
        """What has come of a record's head, of which a part is still to come."""
        self._left = 0
        """Bytes of the record that are still to come."""
        self._framing = _MOST_FRAMING
        """Bytes beside the content that may still come."""

    def have_content(self, size: int, content: int) -> bool:
        """Whether the client may go on after a piece of ``size`` bytes with so many of content."""
        self._framing = min(_MOST_FRAMING, self._framing + (_FRAMING_PER_BYTE + 1) * content - size)
        return self._framing >= 0

    def end_of_piece(self, data: bytes, at: int, enough: int) -> int:
        """Where the first record ends with which there are enough bytes: parts of one would be decrypted only with its end.

        Args:
            data: What has come.
            at: Where the piece begins: the end of the one before.
            enough: Bytes after which no further record is taken.

        Returns:
            The piece's end in ``data``.
        """
        end = at
        most = min(len(data), at + enough)
        while end < most:
            if not self._left:
                head = self._head + data[end : end + _HEAD - len(self._head)]
                end += len(head) - len(self._head)
                if len(head) < _HEAD:
                    self._head = head
                    break
                self._head, self._left = b"", int.from_bytes(head[3:], "big")
            taken = min(self._left, len(data) - end)
            self._left -= taken
            end += taken
        return end
