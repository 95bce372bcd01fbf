"""Pictures and videos as the ``data:`` URLs that APIs of conversations take."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

_PICTURES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
_MATROSKA = b"\x1aE\xdf\xa3"


def picture(source: str | bytes) -> str:
    """A picture's URL: of a file or of bytes one that holds it. Raises OSError, or ValueError for what is no picture."""
    return _url(source, "image", "a PNG, JPEG, GIF or WebP", _picture_kind)


def clip(source: str | bytes) -> str:
    """A video's URL, as :func:`picture`; pictures that move are videos. Raises OSError, or ValueError for what is no video."""
    return _url(source, "video", "an MP4, QuickTime, WebM, Matroska, AVI, GIF, WebP or PNG", _video_kind)


def _url(source: str | bytes, what: str, kinds: str, kind_of: Callable[[bytes], str | None]) -> str:
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return source
    raw = source if isinstance(source, bytes) else Path(source).read_bytes()
    kind = kind_of(raw)
    if kind is None:
        raise ValueError(f"{what}: not {kinds}: {raw[:8]!r}")
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _picture_kind(raw: bytes) -> str | None:
    return next((kind for mark, kind in _PICTURES.items() if raw.startswith(mark)), None)


def _video_kind(raw: bytes) -> str | None:
    if raw[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "video/mp4"
    if raw.startswith(_MATROSKA):
        return "video/webm"
    if raw.startswith(b"RIFF") and raw[8:12] == b"AVI ":
        return "video/x-msvideo"
    return _picture_kind(raw)
