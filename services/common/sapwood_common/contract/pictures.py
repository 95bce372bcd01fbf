"""Pictures in a prompt: the digest of one, and what its tokens add to the hashes of pages.

All tokens of a picture have the same id, whatever the picture shows. So a page that has some of them is named by its tokens and
the digests of its pictures together. Tokenizer, router and workers follow these rules alike.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

DIGEST_BYTES = 32
_MODE = b"RGB8"
"""The only form in which pixels are passed on: three bytes each."""


class PictureSpan(NamedTuple):
    """Where a picture is in a prompt.

    Attributes:
        offset: The place of its first token.
        length: Tokens from its first to its last one; those of other ids between them stand for no part of it.
        token: The id of its tokens.
        digest: What :func:`picture_digest` gives.
    """

    offset: int
    length: int
    token: int
    digest: bytes


class Clip(NamedTuple):
    """What a prepared video's ``layout`` says. Its frames are spread over the file from its first frame on.

    Attributes:
        total: Frames in the file.
        fps: Frames a second of the file.
    """

    total: int
    fps: float

    def layout(self) -> tuple[int, ...]:
        """The numbers of a ``layout``: the frames, and the halves of ``fps`` as a double."""
        return self.total, *struct.unpack("<II", struct.pack("<d", self.fps))

    @classmethod
    def of(cls, layout: Sequence[int]) -> Clip:
        """The clip of a ``layout``. Raises ValueError if it is none."""
        if len(layout) != 3 or not 0 < layout[0] < 2**32:
            raise ValueError("it is no video")
        fps = struct.unpack("<d", struct.pack("<II", *layout[1:]))[0]
        if not 0 < fps <= MOST_FPS:
            raise ValueError(f"a video of {fps} frames a second")
        return cls(layout[0], fps)


MOST_FPS = 1000.0


def picture_digest(salt: str, shape: Sequence[int], layout: Sequence[int], pixels: bytes) -> bytes:
    """SHA-256 of a prepared picture. Pictures of equal bytes and other sizes, or of other tenants, have other digests.

    Args:
        salt: The tenant's cache salt.
        shape: Tiles, height and width.
        layout: Further numbers that the model's family needs.
        pixels: uint8 [tiles, height, width, 3].
    """
    sizes = array("q", (len(shape), *shape, len(layout), *layout)).tobytes()
    name = salt.encode()
    return hashlib.sha256(_MODE + len(name).to_bytes(4, "big") + name + sizes + pixels).digest()


def digests_within(
    pictures: Sequence[PictureSpan], tokens: Sequence[int], start: int, end: int, first: int = 0
) -> bytes:
    """The digests of the pictures that have tokens at places ``start`` to ``end - 1``, in order, each once. O(pictures).

    Args:
        pictures: Those of the prompt.
        tokens: The prompt from place ``first`` on.
        start, end: The places.
        first: The place of the first of ``tokens``.
    """
    found = []
    for each in pictures:
        low, high = max(start, each.offset), min(end, each.offset + each.length)
        if low < high and each.token in tokens[low - first : high - first]:
            found.append(each.digest)
    return b"".join(dict.fromkeys(found))
