"""Files of pictures: odd ones are read as transformers reads them, harmful ones are refused before they are decoded."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageCms, ImageOps, TiffImagePlugin
from transformers.image_transforms import convert_to_rgb

from sapwood_tokenizer.pictures.decoding import PictureError, decode

MOST = 100_000


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    numbers = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(numbers, "RGBA").convert(mode)


def file(image: Image.Image, kind: str, **more: object) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **more)
    return made.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file(picture(), "JPEG", exif=exif)


def palette() -> bytes:
    image = picture("RGB").quantize(16)
    return file(image, "PNG", transparency=3)


def deep() -> Image.Image:
    """16 bits of grey."""
    return Image.fromarray(np.random.default_rng(2).integers(0, 1 << 16, (30, 40), dtype=np.uint16))


def with_thumbnail() -> bytes:
    """A JPEG whose EXIF data hold another one, turned."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x927C] = file(picture(size=(9, 9)), "JPEG")
    return file(picture(), "JPEG", exif=exif)


def scanned(count: int, size: int = 64) -> bytes:
    """A progressive JPEG whose last scan comes so often."""
    content = file(Image.new("RGB", (size, size), (200, 10, 10)), "JPEG", progressive=True, quality=50)
    last = content.rindex(b"\xff\xda")
    end = content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * count + content[end:]


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header says this size, whatever it holds."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        *[file(picture(), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")],
        file(picture("RGBA"), "PNG"),
        file(picture("LA"), "PNG"),
        file(picture("L"), "PNG"),
        file(picture("1"), "PNG"),
        file(picture("CMYK"), "JPEG"),
        file(picture("CMYK"), "TIFF"),
        file(picture(), "JPEG", progressive=True),
        file(picture("RGBA"), "WEBP", lossless=True),
        file(picture(), "GIF", transparency=0),
        palette(),
        *[turned(orientation) for orientation in (1, 3, 6, 8)],
        file(picture(size=(1, 1)), "PNG"),
        file(picture(size=(1, 10_000)), "PNG"),
        file(deep(), "PNG"),
        file(deep(), "TIFF"),
        file(picture("L"), "JPEG", progressive=True),
        file(picture("P"), "BMP"),
        file(picture("1"), "BMP"),
        file(picture("1"), "TIFF", compression="group4"),
        file(picture("YCbCr"), "TIFF"),
        file(picture("LAB"), "TIFF"),
        file(picture("RGBA"), "TIFF", compression="tiff_lzw"),
        file(picture(), "TIFF", compression="tiff_adobe_deflate"),
        file(picture(), "JPEG", subsampling="4:2:0", quality=5),
        file(picture("CMYK"), "JPEG", progressive=True, quality=30),
        file(picture(size=(37, 1)), "JPEG"),
        file(picture("RGBA"), "WEBP", quality=1),
        file(picture(), "JPEG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()),
        with_thumbnail(),
    ],
)
def test_odd_files_are_read_as_transformers_reads_them(content: bytes) -> None:
    expected: Any = convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), return_numpy=True)
    found = decode(content, MOST)
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found), expected)


def test_equal_indexes_under_other_palettes_are_other_pictures() -> None:
    image = picture("RGB").quantize(4)
    one, other = file(image, "PNG"), b""
    image.putpalette([255 - value for value in (image.getpalette() or [])[:12]])
    other = file(image, "PNG")
    assert decode(one, MOST).tobytes() != decode(other, MOST).tobytes()


def animated(kind: str) -> bytes:
    return file(picture(), kind, save_all=True, append_images=[ImageOps.mirror(picture())], duration=10)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: png_of(60_000, 60_000), "60000 x 60000 pixels"),
        (lambda: png_of(1, MOST + 1), "the most are 100000"),
        (lambda: png_of(200, 200, bytes(10)), "damaged"),
        (lambda: file(picture(), "PNG")[:-40], "damaged"),
        (lambda: file(picture(size=(200, 200)), "JPEG")[:600], "damaged"),
        (lambda: scanned(3000), "a JPEG of more than 100 scans"),
        (lambda: animated("GIF"), "animated GIF"),
        (lambda: animated("PNG"), "animated PNG"),
        (lambda: animated("WEBP"), "animated WEBP"),
        (lambda: animated("TIFF"), "several pages"),
        (lambda: b"", "no picture of a kind that is read here: PNG, JPEG, WEBP, GIF, BMP, TIFF"),
        (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture of a kind"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) run\n", "no picture of a kind"),
        (lambda: b"\0\0\0\x20ftypavif" + bytes(60), "no picture of a kind"),
    ],
)
def test_files_that_could_do_harm_are_refused_and_the_error_says_why(make: Callable[[], bytes], says: str) -> None:
    with pytest.raises(PictureError, match=says):
        decode(make(), MOST)


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_pages_of_a_file_are_not_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 11 MB of TIFF with 100 000 directories: Pillow takes minutes to count them.
    def count(self: Image.Image) -> int:
        raise AssertionError("counted")

    content = animated(kind)
    for plugin in (GifImagePlugin.GifImageFile, TiffImagePlugin.TiffImageFile):
        monkeypatch.setattr(plugin, "n_frames", property(count))
    with pytest.raises(PictureError, match="several pages"):
        decode(content, MOST)
    assert decode(file(picture(), kind), MOST).size == picture().size
