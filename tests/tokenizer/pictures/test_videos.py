"""Files of videos: frames are those that were put in; what could do harm is refused before a frame is decoded."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sapwood_common.contract.pictures import Clip
from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.pictures import videos
from sapwood_tokenizer.pictures.decoding import PictureError
from sapwood_tokenizer.pictures.families.family import VideoFamily
from sapwood_tokenizer.pictures.preparer import PictureLimits, Source
from sapwood_tokenizer.pictures.videos import VideoLimits, prepare_video
from tests.tokenizer.pictures.test_preparer import folder_of, noise, png, prepare, preparer

LIMITS = VideoLimits(most_pixels=10_000, frames=8, seconds=10.0, shown_pixels=1_000_000)
SIZE = (64, 48)


class EachSecond(VideoFamily):
    """Takes the first frames as they are."""

    marker = token = "<v>"
    resample = Image.Resampling.BICUBIC

    def sample(self, total: int, fps: float, most: int) -> range:
        return range(min(most, total))

    def frame_size(self, frames: int, width: int, height: int, most_pixels: int) -> tuple[int, int]:
        if width > 3 * height:
            raise ValueError("too wide for the model")
        return width, height

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        return self.token * shape[0]


def grey(level: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """A frame whose left upper quarter is white."""
    numbers = np.full((size[1], size[0], 3), level % 250, np.uint8)
    numbers[: size[1] // 2, : size[0] // 2] = 255
    return Image.fromarray(numbers)


def moving(kind: str, count: int = 5, duration: int = 250, size: tuple[int, int] = SIZE) -> bytes:
    made = io.BytesIO()
    first, *rest = [grey(20 * index, size) for index in range(count)]
    more: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    first.save(made, kind, save_all=True, append_images=rest, duration=duration, **more)
    return made.getvalue()


def filmed(kind: str, codec: str, count: int = 12, rate: int = 4, size: tuple[int, int] = SIZE) -> bytes:
    av = pytest.importorskip("av", reason="the extra video")
    made = io.BytesIO()
    with av.open(made, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for index in range(count):
            frame = av.VideoFrame.from_image(grey(20 * index, size))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return made.getvalue()


def frames_of(content: bytes, limits: VideoLimits = LIMITS) -> tuple[np.ndarray[Any, Any], Clip]:
    found = prepare_video(content, EachSecond(), limits)
    assert found.video
    return np.frombuffer(found.pixels, np.uint8).reshape(*found.shape, 3), Clip.of(found.layout)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_frames_of_animated_pictures_are_those_that_were_put_in(kind: str) -> None:
    frames, clip = frames_of(moving(kind))
    assert clip == Clip(5, 4.0)
    expected = np.stack([np.asarray(grey(20 * index)) for index in range(5)])
    assert np.abs(frames.astype(int) - expected).max() <= (3 if kind == "GIF" else 0)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("matroska", "libx264"),
        ("avi", "mjpeg"),
    ],
)
def test_frames_of_files_are_in_order_and_their_rate_is_known(kind: str, codec: str) -> None:
    frames, clip = frames_of(filmed(kind, codec))
    assert clip.total == 12
    assert clip.fps == pytest.approx(4.0)
    assert frames.shape == (8, 48, 64, 3)
    levels = frames[:, 40, 40].mean(-1)
    assert np.abs(levels - 20 * np.arange(8)).max() < 8
    assert frames[:, 10, 10].min() > 240


def test_a_video_that_a_phone_stored_on_its_side_is_turned_upright() -> None:
    content = bytearray(filmed("mp4", "libx264"))
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = content.index(plain, content.index(b"tkhd"))
    content[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    frames, _ = frames_of(bytes(content))
    assert frames.shape[1:3] == (64, 48)
    assert frames[0, 10, 40].min() > 240, "what was left above is right above now"
    assert frames[0, 50, 10].max() < 20


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (PLAYLIST, "no video of a kind that is read here: MP4"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "no video of a kind"),
        (b"<MPD xmlns='urn:mpeg:dash:schema:mpd:2011'/>", "no video of a kind"),
        (b"", "no video of a kind"),
        (b"\0\0\0\x20ftypisom" + PLAYLIST, "damaged|needs the package"),
        (b"\x1aE\xdf\xa3" + bytes(100), "damaged|needs the package"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "damaged"),
        (moving("PNG", size=(101, 100)), "frames of 101 x 100 pixels: the most are 10000"),
        (moving("PNG", size=(96, 16)), "too wide for the model"),
        (moving("GIF", duration=4000), "a video of more than 10 s"),
    ],
)
def test_files_that_could_do_harm_are_refused_as_videos_and_the_error_says_why(content: bytes, says: str) -> None:
    with pytest.raises(PictureError, match=says):
        prepare_video(content, EachSecond(), LIMITS)


def growing_gif(*corners: tuple[int, int]) -> bytes:
    """A GIF of 8 x 8 pixels whose frames have theirs so far from its corner; each has a hundred bytes at most."""
    made = bytearray(b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6))
    for left, top in corners:
        made += (
            b"\x21\xf9\x04\0\x0a\0\0\0" + b"\x2c" + struct.pack("<HHHHB", left, top, 1, 1, 0) + b"\x02\x02\x44\x01\0"
        )
    return bytes(made + b";")


def test_a_gif_is_refused_before_a_frame_makes_it_larger_than_pictures_may_be() -> None:
    assert frames_of(growing_gif((0, 0), (7, 7)))[0].shape == (2, 8, 8, 3)
    for corners in [((0, 0), (5000, 5000)), ((0, 0), (50, 50), (200, 100))]:
        with pytest.raises(PictureError, match=r"frames of \d+ x \d+ pixels: the most are 10000"):
            prepare_video(growing_gif(*corners), EachSecond(), LIMITS)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"size": (128, 80)}, "frames of 128 x 80 pixels"),
        ({"rate": 1}, "a video of more than 10 s"),
        ({"codec": "ffv1", "kind": "matroska"}, "its codec is 'ffv1'|damaged"),
    ],
)
def test_limits_of_files_hold_before_a_frame_is_decoded(
    more: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = filmed(**{"kind": "mp4", "codec": "libx264", **more})
    monkeypatch.setattr(videos._File, "_frames", lambda _: iter([]))
    with pytest.raises(PictureError, match=says):
        prepare_video(content, EachSecond(), LIMITS)


def test_a_file_that_ends_early_shows_its_last_frame_for_the_rest() -> None:
    content = filmed("matroska", "mjpeg", 8)
    frames, _ = frames_of(content[: len(content) * 3 // 4])
    assert 1 < len(frames) <= 8


def test_without_the_package_files_are_refused_by_its_name_and_animated_pictures_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(videos, "av", None)
    with pytest.raises(PictureError, match=r"need the package av \(sapwood\[video\]\)"):
        prepare_video(b"\0\0\0\x20ftypisom", EachSecond(), LIMITS)
    assert len(frames_of(moving("WEBP"))[0]) == 5


async def test_videos_are_prepared_in_processes_once_and_apart_from_pictures(tmp_path: Path) -> None:
    limits = PictureLimits(3, 1 << 20, 4_000_000, 20.0, 2, 256 << 20, 4 << 20, 16 << 20, 4 << 20, frames=6)
    async with preparer(folder_of("qwen2_5_vl", tmp_path), limits) as made:
        file = moving("PNG", 20, 100)
        shown = Source(file, "", "messages[0].items[0]", video=True)
        (first,) = await prepare(made, [shown], "a")
        (again,) = await prepare(made, [shown], "a")
        assert again is first
        assert first.video
        assert (first.shape[0], Clip.of(first.layout)) == (4, Clip(20, 10.0)), "two frames a second"
        with pytest.raises(InvalidArgumentError, match="the picture cannot be used: an animated PNG"):
            await prepare(made, [Source(file, "", "messages[0].items[0]")], "a")
        still = Source(png(noise(60, 60)), "", "messages[0].items[1]")
        found = await prepare(made, [still, shown], "a")
        text = made.expand("a <|image_pad|> b <|video_pad|> c", found)
        assert text.count("<|image_pad|>") == made._family.count(found[0].shape, found[0].layout)
        with pytest.raises(InvalidArgumentError, match=r"a text holds '<\|image_pad\|>' or '<\|video_pad\|>'"):
            made.expand("a <|video_pad|> b <|image_pad|> c", found)
        if videos.av is not None:
            (filed,) = await prepare(made, [Source(filmed("mp4", "libx264"), "", "x", video=True)], "a")
            assert (filed.shape[0], Clip.of(filed.layout).total) == (6, 12)


async def test_a_family_without_videos_refuses_them_by_field(tmp_path: Path) -> None:
    limits = PictureLimits(3, 1 << 20, 4_000_000, 20.0, 2, 256 << 20, 2 << 20, 8 << 20, 1 << 20)
    async with preparer(folder_of("llava", tmp_path), limits) as made:
        with pytest.raises(InvalidArgumentError, match="this model takes no videos") as caught:
            await prepare(made, [Source(moving("PNG"), "", "messages[1].items[2]", video=True)], "")
        assert caught.value.field == "messages[1].items[2]"
