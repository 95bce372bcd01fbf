"""A step in wire form: written into one buffer, and read in place by a runner in this or another process.

The buffer holds a header of int64 numbers, the step's arrays, its records in msgpack, and room for its grammar masks. These are
filled while the model computes: :func:`write_masks` brings them later, and who reads the step waits for them only where they are
needed. Each array lies at a multiple of 8 bytes. All numbers are native, since writer and reader share a machine.
"""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood_worker.records.page_copies import Copies
from sapwood_worker.records.step import Entry, IntArray, Masks, Step

Buffer = bytearray | memoryview
"""Writable."""

_MAGIC = 0x5345_5453_0001
_FIELDS = 10
_, _STATE, _BYTES, _NUMBER, _PARTS, _TOKENS, _WIDTH, _MASKED, _WORDS, _RECORDS = range(_FIELDS)
_AWAITED, _THERE, _FAILED = range(3)
_POLL_SECONDS = 50e-6

_Records = tuple[tuple[Entry, ...], Copies | None]


def _pack(value: Any) -> bytes:
    assert isinstance(value, np.ndarray)
    return value.astype(np.int32, copy=False).tobytes()


def _unpack(_: type, data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, np.int32)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder: msgspec.msgpack.Decoder[_Records] = msgspec.msgpack.Decoder(_Records, dec_hook=_unpack)


class BufferMasks:
    """Implements :class:`~sapwood_worker.records.step.LateMasks` over a step's buffer.

    Args:
        header: The buffer's, int64.
        masks: Their room in the buffer.
    """

    def __init__(self, header: IntArray, masks: Masks) -> None:
        self._header = header
        self._masks = masks

    def result(self) -> Masks:
        """Raises RuntimeError if the writer could not fill them."""
        while self._header[_STATE] == _AWAITED:
            time.sleep(_POLL_SECONDS)
        if self._header[_STATE] == _FAILED:
            raise RuntimeError("the grammar masks of this step could not be filled")
        return self._masks


def encode(step: Step, mask_words: int) -> bytearray:
    """The step and its masks, of so many int32 words each, in a buffer of its own. Waits for the masks."""
    header, records = _describe(step, mask_words)
    buffer = bytearray(int(header[_BYTES]))
    _fill(step, header, records, buffer)
    write_masks(step, buffer)
    return buffer


def write(step: Step, buffer: Buffer, mask_words: int) -> int:
    """Writes a step but for its masks; returns how many bytes it takes, masks included.

    Args:
        step: The step.
        buffer: Where to; nobody reads what is there any more.
        mask_words: int32 words of a mask.

    Raises:
        ValueError: It does not fit.
    """
    header, records = _describe(step, mask_words)
    size = int(header[_BYTES])
    if size > len(buffer):
        raise ValueError(f"the step takes {size} bytes, of which the buffer has {len(buffer)}")
    _fill(step, header, records, buffer)
    return size


def write_masks(step: Step, buffer: Buffer) -> None:
    """Waits for the masks of a step that :func:`write` has put there, and writes them too."""
    header = np.frombuffer(buffer, np.int64, _FIELDS)
    state = _THERE
    if step.masks is not None:
        try:
            _views(header, buffer)[-1][:] = step.masks.result()
        except Exception:  # the runner beside it is told what; the reader must not wait for ever
            state = _FAILED
    header[_STATE] = state


def read(buffer: Buffer) -> Step:
    """The step that was written into a buffer. Its arrays lie there: it is good until the buffer changes.

    Raises:
        ValueError: There is no whole step in the buffer.
    """
    if len(buffer) < 8 * _FIELDS:
        raise ValueError(f"{len(buffer)} bytes hold no step")
    header = np.frombuffer(buffer, np.int64, _FIELDS)
    if header[0] != _MAGIC or (header < 0).any() or not _size(header) == header[_BYTES] <= len(buffer):
        raise ValueError("the buffer does not hold a whole step")
    parts, tokens, masked, pages, records, masks = _views(header, buffer)
    entries, copies = _decoder.decode(records.data) if len(records) else ((), None)
    late = BufferMasks(header, masks) if len(masked) else None
    rows, starts, counts, samples = parts
    return Step(int(header[_NUMBER]), rows, starts, counts, samples, tokens, pages, entries, masked, late, copies)


def _describe(step: Step, mask_words: int) -> tuple[IntArray, bytes]:
    """The header and the records."""
    records = _encoder.encode((step.entries, step.copies)) if step.entries or step.copies is not None else b""
    parts, width = step.pages.shape
    numbers = (_MAGIC, _AWAITED, 0, step.number, parts, len(step.token_ids), width, len(step.masked), mask_words)
    header = np.array([*numbers, len(records)], np.int64)
    header[_BYTES] = _size(header)
    return header, records


def _fill(step: Step, header: IntArray, records: bytes, buffer: Buffer) -> None:
    np.frombuffer(buffer, np.int64, _FIELDS)[:] = header
    parts, tokens, masked, pages, packed, _ = _views(header, buffer)
    for place, numbers in zip(parts, (step.rows, step.starts, step.counts, step.samples), strict=True):
        place[:] = numbers
    tokens[:], masked[:], pages[:] = step.token_ids, step.masked, step.pages
    packed[:] = np.frombuffer(records, np.uint8)


def _shapes(header: IntArray) -> tuple[tuple[type[np.generic], tuple[int, ...]], ...]:
    """The arrays behind a header, in order: dtype and shape."""
    _, _, _, _, parts, tokens, width, masked, words, records = header.tolist()
    return (
        (np.int64, (4, parts)),
        (np.int64, (tokens,)),
        (np.int64, (masked,)),
        (np.int32, (parts, width)),
        (np.uint8, (records,)),
        (np.int32, (masked, words)),
    )


def _bytes_of(dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    """What an array takes, filled up to a multiple of 8."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 8) * 8


def _size(header: IntArray) -> int:
    return 8 * _FIELDS + sum(_bytes_of(dtype, shape) for dtype, shape in _shapes(header))


def _views(header: IntArray, buffer: Buffer) -> list[npt.NDArray[Any]]:
    views: list[npt.NDArray[Any]] = []
    at = 8 * _FIELDS
    for dtype, shape in _shapes(header):
        views.append(np.frombuffer(buffer, dtype, math.prod(shape), at).reshape(shape))
        at += _bytes_of(dtype, shape)
    return views
