"""A step in wire form: written into one buffer, and read in place by a runner in another process.

The buffer holds a header of int64 numbers, the step's arrays, and its records in msgpack. Each array lies at a multiple of 8
bytes. Grammar masks are filled while the model computes, and are sent separately (:func:`encode_masks`). All numbers are native,
as writer and reader share a machine.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_worker.records.expert_load import ExpertMove
from sapwood_worker.records.lora import LoraLoad
from sapwood_worker.records.step import Copies, Entry, IntArray, LateMasks, Masks, Step

_MAGIC = 0x5345_5453_0009
_FIELDS = 15
(
    _, _BYTES, _NUMBER, _PARTS, _TOKENS, _WIDTH, _MASKED, _RECORDS, _RANKS, _DECODES, _AGAIN, _SAVES, _SCORED, _COPIES, _JOINS,
) = range(_FIELDS)  # fmt: skip

_Records = tuple[tuple[Entry, ...], Copies | None, tuple[ExpertMove, ...], tuple[LoraLoad, ...]]


def _pack(value: Any) -> bytes:
    assert isinstance(value, np.ndarray)
    return value.astype(np.int32, copy=False).tobytes()


def _unpack(_: type, data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(bytearray(data), np.int32)  # writable: torch asks for it


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder: msgspec.msgpack.Decoder[_Records] = msgspec.msgpack.Decoder(_Records, dec_hook=_unpack)


def encode(step: Step) -> bytearray:
    """The step without its masks; of a step with parts, one part."""
    assert not step.parts and step.late is None, "each rank gets its own, and all tokens"
    held = step.entries, step.copies, step.moves, step.lora_loads
    records = _encoder.encode(held) if any(each is not None and each != () for each in held) else b""
    parts, width = step.pages.shape
    numbers = (_MAGIC, 0, step.number, parts, len(step.token_ids), width, len(step.masked), len(records))
    ends = (
        len(step.rank_tokens),
        step.decodes,
        len(step.again),
        len(step.saves),
        len(step.scored),
        len(step.page_copies),
        len(step.joins),
    )
    header = np.array((*numbers, *ends), np.int64)
    header[_BYTES] = _size(header)
    buffer = bytearray(int(header[_BYTES]))
    np.frombuffer(buffer, np.int64, _FIELDS)[:] = header
    places, tokens, masked, ranks, again, saves, scored, copies, joins, pages, packed = _views(header, buffer)
    for place, array in zip(places, (step.rows, step.starts, step.counts, step.samples), strict=True):
        place[:] = array
    tokens[:], masked[:], ranks[:], pages[:] = step.token_ids, step.masked, step.rank_tokens, step.pages
    again[:], saves[:], scored[:], copies[:] = step.again, step.saves, step.scored, step.page_copies
    joins[:] = step.joins
    packed[:] = np.frombuffer(records, np.uint8)
    return buffer


def read(buffer: bytearray, masks: LateMasks | None = None) -> Step:
    """The step that :func:`encode` has written. Its arrays lie in the buffer, so it is valid until the buffer changes.

    Args:
        buffer: The buffer.
        masks: Brings the step's masks, if it has any.

    Raises:
        ValueError: There is no whole step in the buffer.
    """
    if len(buffer) < 8 * _FIELDS:
        raise ValueError(f"{len(buffer)} bytes hold no step")
    header = np.frombuffer(buffer, np.int64, _FIELDS)
    if header[0] != _MAGIC or (header < 0).any() or not _size(header) == header[_BYTES] <= len(buffer):
        raise ValueError("the buffer does not hold a whole step")
    parts, tokens, masked, ranks, again, saves, scored, page_copies, joins, pages, records = _views(header, buffer)
    entries, copies, moves, loads = _decoder.decode(records.data) if len(records) else ((), None, (), ())
    rows, starts, counts, samples = parts
    late = masks if len(masked) else None
    step = Step(
        int(header[_NUMBER]), rows, starts, counts, samples, tokens, pages, entries, masked, late, copies, moves, loads
    )
    step.rank_tokens, step.decodes = ranks, bool(header[_DECODES])
    step.again, step.saves, step.scored, step.page_copies = again, saves, scored, page_copies
    step.joins = joins
    return step


def encode_masks(masks: Masks) -> bytes:
    """A step's masks, int32 [G, W]."""
    return masks.tobytes()


def read_masks(buffer: bytearray, count: int) -> Masks:
    """The ``count`` masks that :func:`encode_masks` has written, at least one, in place."""
    return np.frombuffer(buffer, np.int32).reshape(count, -1)


def _shapes(header: IntArray) -> tuple[tuple[type[np.generic], tuple[int, ...]], ...]:
    """The arrays behind a header, in order: dtype and shape."""
    _, _, _, parts, tokens, width, masked, records, ranks, _, again, saves, scores, copies, joins = header.tolist()
    return (
        (np.int64, (4, parts)),
        (np.int64, (tokens,)),
        (np.int64, (masked,)),
        (np.int64, (ranks,)),
        (np.int64, (again,)),
        (np.int64, (saves, 3)),
        (np.int64, (scores, 3)),
        (np.int64, (copies, 3)),
        (np.int64, (joins, 2)),
        (np.int32, (parts, width)),
        (np.uint8, (records,)),
    )


def _bytes_of(dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    """What an array takes, filled up to a multiple of 8."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 8) * 8


def _size(header: IntArray) -> int:
    return 8 * _FIELDS + sum(_bytes_of(dtype, shape) for dtype, shape in _shapes(header))


def _views(header: IntArray, buffer: bytearray) -> list[npt.NDArray[Any]]:
    views: list[npt.NDArray[Any]] = []
    at = 8 * _FIELDS
    for dtype, shape in _shapes(header):
        views.append(np.frombuffer(buffer, dtype, math.prod(shape), at).reshape(shape))
        at += _bytes_of(dtype, shape)
    return views
