"""Pictures of a request, prepared for the model: what the front, the scheduler and the runner know of one."""

from __future__ import annotations

import msgspec


class PictureInfo(msgspec.Struct, frozen=True):
    """What a model does with pictures.

    Attributes:
        family: The name of its vision family.
        tokens: The ids of the tokens that stand for pictures, and for videos.
        whole: Whether the tokens of a picture see all of it, so that they must be computed in one step.
        most_bytes: The most bytes of pixels that a request may have.
    """

    family: str
    tokens: tuple[int, ...]
    whole: bool
    most_bytes: int


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """A picture, or a video, in a prompt.

    Attributes:
        offset: The place of its first token.
        length: Tokens from its first to its last one. Those with the id of the first stand for parts of the picture, those
            between them are for example ends of rows.
        digest: ``sapwood_common.contract.pictures.picture_digest`` of it.
        shape: Tiles, height and width.
        layout: Further numbers that the family needs.
        pixels: uint8 [tiles, height, width, 3]; empty where all of its tokens are in the cache.
    """

    offset: int
    length: int
    digest: bytes
    shape: tuple[int, int, int]
    layout: tuple[int, ...] = ()
    pixels: bytes = b""

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.offset + self.length


class Pictured(msgspec.Struct, frozen=True, array_like=True):
    """What the runner has to know of a request with pictures.

    Attributes:
        tokens: Native uint32: the prompt up to the end of its last picture, or more.
        pictures: The pictures, in order; they do not overlap.
    """

    tokens: bytes
    pictures: tuple[Picture, ...]


class PictureUse(msgspec.Struct, frozen=True, array_like=True):
    """What became of the pictures and videos that steps needed, since the start.

    Attributes:
        encoded: How many went through the tower.
        device: How many had an encoding on the device.
        host: How many had one in the host's memory.
        tokens: Tokens of those that went through the tower.
        seconds: Seconds that the tower took; on a GPU, those of launching it.
        device_bytes, host_bytes: Bytes of encodings that are kept now.
    """

    encoded: int = 0
    device: int = 0
    host: int = 0
    tokens: int = 0
    seconds: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0
