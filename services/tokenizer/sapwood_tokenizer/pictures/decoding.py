"""Files of pictures to pixels. A file may have been made to do harm: :func:`decode` runs in a process of its own.

The header alone tells format, size and frames; a file that is refused for these is not decoded.
"""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""As Pillow names them."""
_MOST_SCANS = 100
"""Of a JPEG: each is as much work as a whole picture, and may have 20 bytes. Encoders write ten or so."""
_SEVERAL = ("MPO",)
"""A JPEG with further pictures behind it, as phones write them: the first is taken."""


class PictureError(Exception):
    """A file is no picture that is taken; the message says why."""


def decode(content: bytes, most_pixels: int) -> Image.Image:
    """The picture in a file, upright and in RGB; what is transparent is white.

    Args:
        content: The file.
        most_pixels: More are refused before they are decoded.

    Raises:
        PictureError: It is none, has too many pixels, is animated or damaged.
    """
    Image.MAX_IMAGE_PIXELS = None  # the bound below is ours
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that are odd, and can be read
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = image.size
            if width * height > most_pixels:
                raise PictureError(f"a picture of {width} x {height} pixels: the most are {most_pixels}")
            if not width or not height:
                raise PictureError("a picture without pixels")
            if image.format not in _SEVERAL and getattr(
                image, "is_animated", False
            ):  # to count frames may take minutes
                raise PictureError(f"an animated {image.format}, or one with several pages: send one picture")
            # A marker is nowhere in what a scan holds; a picture within the file's metadata has a few more.
            if image.format in ("JPEG", *_SEVERAL) and content.count(b"\xff\xda") > _MOST_SCANS:
                raise PictureError(f"a JPEG of more than {_MOST_SCANS} scans")
            image.load()
            return upright(image)
    except PictureError:
        raise
    except MemoryError:
        raise PictureError("it needs too much memory") from None
    except UnidentifiedImageError:
        raise PictureError(f"it is no picture of a kind that is read here: {', '.join(FORMATS)}") from None
    except Exception as error:  # of a decoder that stumbles over the file, of whatever class
        raise PictureError(f"it is damaged: {str(error)[:200]}") from None


def upright(image: Image.Image) -> Image.Image:
    """A decoded picture in RGB, turned as its EXIF data say; what is transparent is white."""
    turned = ImageOps.exif_transpose(image)
    if turned.mode == "RGB" and turned.info.get("transparency") is None:
        return turned
    if "A" in turned.getbands() or turned.info.get("transparency") is not None:
        clear = turned.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear).convert("RGB")
    return turned.convert("RGB")
