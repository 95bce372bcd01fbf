"""Files of videos to frames. A file may have been made to do harm: this runs in a process of its own.

Rules. What the first bytes say chooses the one reader that the file is given to: FFmpeg's readers of playlists, which follow URLs
and paths, never see a file. Codecs are of a list. Size, length and count are looked at before a frame is decoded; frames are
decoded in order, up to the last one that is wanted, in O(its place).
"""

from __future__ import annotations

import io
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from PIL import Image, ImageSequence

from sapwood_common.contract.pictures import MOST_FPS, Clip
from sapwood_tokenizer.pictures.decoding import PictureError, upright
from sapwood_tokenizer.pictures.families.family import Prepared, VideoFamily

av: Any
try:
    import av
except ImportError:  # the extra "video"
    av = None

KINDS = "MP4, QuickTime, WebM, Matroska, AVI, or an animated GIF, WebP or PNG"
_MOVING = ("GIF", "WEBP", "PNG")
_CODECS = ("h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4", "mpeg2video", "mjpeg")
_MOST_COUNTED = 1 << 20
"""Frames of a file."""
_NO_LENGTH = 100
"""Milliseconds of a frame of an animated picture that says 0, as browsers have it."""


class VideoLimits(NamedTuple):
    """What is taken.

    Attributes:
        most_pixels: Pixels of a frame in the file.
        frames: Frames that a model is shown.
        seconds: Length of the video.
        shown_pixels: Pixels of all frames that are shown, once they were resized.
    """

    most_pixels: int
    frames: int
    seconds: float
    shown_pixels: int


class _Video(ABC):
    """A file that was looked at.

    Attributes:
        clip: Its length.
        size: Width and height, upright.
    """

    clip: Clip
    size: tuple[int, int]

    @abstractmethod
    def frames(self) -> Iterator[Image.Image]:
        """All frames in order, RGB and upright."""


def prepare_video(content: bytes, family: VideoFamily, limits: VideoLimits) -> Prepared:
    """A video for a model.

    Args:
        content: The file.
        family: How the model takes videos.
        limits: What is taken.

    Raises:
        PictureError: It is none that is taken, or damaged, or the model takes no such video; says why.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            video = _opened(content, limits)
            clip = video.clip
            if clip.total / clip.fps > limits.seconds:
                raise PictureError(
                    f"a video of {clip.total / clip.fps:.3g} s: the longest that are taken have {limits.seconds:.3g} s"
                )
            wanted = family.sample(clip.total, clip.fps, limits.frames)
            try:
                size = family.frame_size(len(wanted), *video.size, limits.shown_pixels)
            except ValueError as error:
                raise PictureError(str(error)) from None
            return _shown(video, wanted, size, family.resample)
    except PictureError:
        raise
    except MemoryError:
        raise PictureError("it needs too much memory") from None
    except Exception as error:  # of a decoder that stumbles over the file, of whatever class
        raise PictureError(f"it is damaged: {str(error)[:200]}") from None


def _shown(video: _Video, wanted: Sequence[int], size: tuple[int, int], resample: Image.Resampling) -> Prepared:
    """The frames that are wanted. Where fewer come than the file says it has, the last one stands for the rest."""
    found: list[bytes] = []
    for place, image in enumerate(video.frames()):
        if place != wanted[len(found)]:
            continue
        found.append(image.resize(size, resample).tobytes())
        if len(found) == len(wanted):
            break
    if not found:
        raise PictureError("it has no frame that can be decoded")
    found += found[-1:] * (len(wanted) - len(found))
    return Prepared((len(wanted), size[1], size[0]), video.clip.layout(), b"".join(found), video=True)


def _opened(content: bytes, limits: VideoLimits) -> _Video:
    if content[:4] in (b"GIF8", b"\x89PNG") or (content[:4] == b"RIFF" and content[8:12] == b"WEBP"):
        return _Moving(content, limits)
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return _File(content, "mov", limits)
    if content[:4] == b"\x1aE\xdf\xa3":
        return _File(content, "matroska", limits)
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return _File(content, "avi", limits)
    raise PictureError(f"it is no video of a kind that is read here: {KINDS}")


def _check(width: int, height: int, limits: VideoLimits) -> None:
    if width <= 0 or height <= 0:
        raise PictureError("a video without pixels")
    if width * height > limits.most_pixels:
        raise PictureError(f"frames of {width} x {height} pixels: the most are {limits.most_pixels}")


class _Moving(_Video):
    """An animated picture."""

    def __init__(self, content: bytes, limits: VideoLimits) -> None:
        self._image = Image.open(io.BytesIO(content), formats=_MOVING)
        self.size = self._image.size
        _check(*self.size, limits)
        count, length = 0, 0.0
        for frame in ImageSequence.Iterator(self._image):  # each is decoded: only so GIF and WebP tell its length
            count += 1
            _check(*frame.size, limits)  # a frame of a GIF that is larger than its picture makes that larger
            frame.load()
            length += frame.info.get("duration") or _NO_LENGTH
            if length > 1000 * limits.seconds:
                raise PictureError(f"a video of more than {limits.seconds:.3g} s")
        self.clip = Clip(count, min(MOST_FPS, 1000 * count / length))

    def frames(self) -> Iterator[Image.Image]:
        for frame in ImageSequence.Iterator(self._image):
            yield upright(frame.copy())


class _File(_Video):
    """A file that FFmpeg reads."""

    def __init__(self, content: bytes, kind: str, limits: VideoLimits) -> None:
        if av is None:
            raise PictureError(
                f"videos in files of kind {kind} need the package av (sapwood[video]), which is not installed here; an "
                "animated GIF, WebP or PNG does not"
            )
        self._limits = limits
        options = {"protocol_whitelist": "none", "enable_drefs": "0", "codec_whitelist": ",".join(_CODECS)}
        self._container: Any = av.open(io.BytesIO(content), format=kind, options=options)
        if not self._container.streams.video:
            raise PictureError("it has no pictures")
        self._stream = self._container.streams.video[0]
        context = self._stream.codec_context
        if context.name not in _CODECS:
            raise PictureError(f"its codec is {context.name!r:.40}; {', '.join(_CODECS)} are read")
        context.thread_count = 1
        _check(context.width, context.height, limits)
        rate = self._stream.average_rate or self._stream.guessed_rate
        fps = float(rate) if rate else 0.0
        if not 0 < fps <= MOST_FPS:
            raise PictureError(f"it has {fps:.3g} frames a second")
        # A header may say anything: its frames are counted, which decodes none.
        most, count = min(_MOST_COUNTED, int(limits.seconds * fps) + 1), 0
        for packet in self._container.demux(self._stream):
            count += bool(packet.size)
            if count > most:
                raise PictureError(f"a video of more than {limits.seconds:.3g} s")
        if not count:
            raise PictureError("it has no frames")
        self.clip = Clip(count, fps)
        self._container.seek(0)
        self._turn = 0
        self.size = context.width, context.height
        self._first = self._frames()
        first = next(self._first, None)
        self._begun = [] if first is None else [first]
        if first is not None:
            self.size = first.size

    def frames(self) -> Iterator[Image.Image]:
        yield from self._begun
        yield from self._first

    def _frames(self) -> Iterator[Image.Image]:
        for frame in self._container.decode(self._stream):
            _check(frame.width, frame.height, self._limits)
            image: Image.Image = frame.to_image()
            turned = frame.rotation % 360  # as phones store what was taken upright
            yield image.rotate(turned, expand=True) if turned else image
