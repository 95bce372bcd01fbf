"""The process that decodes and resizes: ``python -P -m sapwood_tokenizer.pictures.prepare_process``, of a ``ChildPool``.

The settings are a JSON object: the fields of ``PictureSettings``, and in ``videos`` those of ``VideoLimits``, whose
``most_pixels`` holds for pictures too. The greeting is empty, or an error.

A question is a byte that is 1 for a video, the length of ``detail`` in a byte, ``detail``, and the file. An answer is ``+``, a
JSON list of shape and layout with its length in four bytes, and the pixels; or ``-`` and the error.
"""

from __future__ import annotations

import json
import sys

from sapwood_common.child_pool import Answer, serve_parent
from sapwood_tokenizer.pictures.decoding import PictureError, decode
from sapwood_tokenizer.pictures.families.family import PictureFamily, PictureSettings
from sapwood_tokenizer.pictures.families.registry import picture_family
from sapwood_tokenizer.pictures.videos import VideoLimits, prepare_video


def make(settings: bytes) -> tuple[bytes, Answer]:
    """Makes what answers."""
    given = json.loads(settings)
    entry = picture_family(given["config"])
    assert entry is not None, "its parent has found one"
    limits = VideoLimits(**given.pop("videos"))
    family = entry.make(PictureSettings(**given))
    return b"", lambda question: _answer(family, limits, question)


def _answer(family: PictureFamily, limits: VideoLimits, question: bytes) -> bytes:
    start = 2 + question[1]
    try:
        if question[0]:
            assert family.video is not None, "its parent has looked"
            found = prepare_video(question[start:], family.video, limits)
        else:
            found = family.prepare(decode(question[start:], limits.most_pixels), question[2:start].decode())
    except (PictureError, ValueError) as error:
        return b"-" + str(error).encode()
    except MemoryError:
        return b"-it needs too much memory"
    head = json.dumps([found.shape, found.layout]).encode()
    return b"".join((b"+", len(head).to_bytes(4, "big"), head, found.pixels))


if __name__ == "__main__":
    sys.exit(serve_parent(make))
