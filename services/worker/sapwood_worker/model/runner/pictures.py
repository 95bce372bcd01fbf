"""Pictures in steps: the encodings that are kept, and what a step's tokens get of them.

A picture goes through the tower in the first step that computes one of its tokens. Its encoding is kept under its digest, so the
next chunk of the prompt, a retraction and another request of the same tenant find it. Bound: ``most_bytes`` of encodings that no
row of the page table needs; those that are used longest ago go first, to the host's memory, where ``host_bytes`` are kept. A step
costs O(its tokens) on the host.

Invariant: a row's encodings stay as long as the row has tokens of the picture to compute, so a picture is encoded at most once
for a request that keeps its row.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_common.errors import InvalidArgumentError
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, in_tables
from sapwood_worker.model.families.decoder import SeenTokens
from sapwood_worker.model.vision.tower import IntArray, Vision
from sapwood_worker.records.pictures import Picture, Pictured, PictureUse
from sapwood_worker.records.step import Step


@dataclass(slots=True)
class _Row:
    """A request with pictures.

    Attributes:
        pictures: The pictures, without their pixels once they have been encoded.
        places: For each picture, the places of the tokens that stand for its parts, in order.
        positions: int64 [3, length + 1], as :meth:`Vision.positions` gives them; None: there is one axis.
        encodings: By the picture's index, what the tower made of it.
    """

    pictures: list[Picture]
    places: list[IntArray]
    positions: IntArray | None
    encodings: dict[int, Tensor]

    @property
    def end(self) -> int:
        """The place after the last picture."""
        return self.pictures[-1].end

    def on_axes(self, start: int, count: int) -> IntArray:
        """int64 [3, count]: positions of the tokens from place ``start`` on."""
        known = self.positions
        assert known is not None
        length = known.shape[1] - 1
        found = np.empty((3, count), np.int64)
        inside = max(0, min(count, length - start))
        found[:, :inside] = known[:, start : start + inside]
        found[:, inside:] = known[:, length:] + np.arange(start + inside - length, start + count - length)
        return found


class PictureEncoder:
    """The vision part of a runner.

    Args:
        vision: The tower.
        ops: The device's operations.
        most_bytes: Bytes of encodings that are kept for later.
        host_bytes: And how many in the host's memory, of those that gave way.

    Attributes:
        vision: The argument.
        encoded, reused, fetched: How many pictures went through the tower, how many had their encoding here, and how many in the
            host's memory.
    """

    def __init__(self, vision: Vision, ops: DeviceOps, most_bytes: int, host_bytes: int = 0) -> None:
        self.vision = vision
        self.encoded = self.reused = self.fetched = 0
        self._ops = ops
        self._kept, self._host = _Encodings(most_bytes), _Encodings(host_bytes)
        self._tokens, self._seconds = 0, 0.0
        self._rows: dict[int, _Row] = {}

    @property
    def use(self) -> PictureUse:
        """What became of pictures so far."""
        return PictureUse(
            self.encoded, self.reused, self.fetched, self._tokens, self._seconds, self._kept.bytes, self._host.bytes
        )

    def check(self, pictures: Sequence[Picture], prompt: array[int]) -> None:
        """Raises InvalidArgumentError unless the model can use these pictures at these tokens; names the field."""
        tokens = np.frombuffer(prompt, np.uint32)
        for index, each in enumerate(pictures):
            field = f"pictures[{index}]"
            try:
                count = self.vision.count(each.shape, each.layout)
            except (ValueError, IndexError) as error:
                raise InvalidArgumentError(f"the model does not take this picture: {error}", field=field) from None
            given = int((tokens[each.offset : each.end] == self.vision.token_of(each.layout)).sum())
            if given != count:
                raise InvalidArgumentError(
                    f"{given} tokens stand for a picture of {count}, from place {each.offset} to {each.end - 1}",
                    field=field,
                )

    def enter(self, row: int, pictured: Pictured | None) -> None:
        """Takes note of the request that gets a row."""
        self._rows.pop(row, None)
        if pictured is None or not pictured.pictures:
            return
        tokens = np.frombuffer(pictured.tokens, np.uint32)
        places = [
            each.offset + np.flatnonzero(tokens[each.offset : each.end] == self.vision.token_of(each.layout))
            for each in pictured.pictures
        ]
        positions = self.vision.positions(len(tokens), pictured.pictures, places)
        self._rows[row] = _Row(list(pictured.pictures), places, positions, {})

    def concern(self, step: Step) -> bool:
        """Whether pictures change what a step computes: its tokens, or their positions."""
        if not self._rows:
            return False
        known = (
            (self._rows.get(row), start) for row, start in zip(step.rows.tolist(), step.starts.tolist(), strict=True)
        )
        return any(row is not None and (row.positions is not None or start < row.end) for row, start in known)

    def of(self, step: Step, positions: Tensor) -> tuple[Tensor, SeenTokens | None]:
        """What the tokens of a step get; at least one row has pictures.

        Args:
            step: The step.
            positions: int64 [T]: their places.

        Returns:
            Their positions, [T] or [3, T], and the tokens that stand for pictures.
        """
        ends = np.cumsum(step.counts)
        rows: list[IntArray] = []
        values: list[Tensor] = []
        axes: npt.NDArray[Any] | None = None
        for row, start, count, end in zip(
            step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), ends.tolist(), strict=True
        ):
            known = self._rows.get(row)
            if known is None:
                continue
            first = end - count
            if known.positions is not None:
                if axes is None:
                    axes = np.tile(_places(step, ends), (3, 1))
                axes[:, first:end] = known.on_axes(start, count)
            for index, places in enumerate(known.places):
                low, high = np.searchsorted(places, (start, start + count))
                if low < high:
                    rows.append(places[low:high] - start + first)
                    values.append(self._encoding(known, index)[:, low:high])
                if len(places) <= high:
                    known.encodings.pop(index, None)
        if axes is not None:
            positions = self._ops.to_device(axes)
        if not rows:
            return positions, None
        return positions, SeenTokens(self._ops.to_device(np.concatenate(rows)), torch.cat(values, 1))

    def reaching(self, step: Step, batch: AttentionBatch) -> AttentionBatch:
        """The step's attention: if pictures are seen whole, each of a picture's tokens sees the picture to its end."""
        if not self.vision.whole:
            return batch
        reach = _places(step, np.cumsum(step.counts))
        ends = np.cumsum(step.counts)
        for row, start, count, end in zip(
            step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), ends.tolist(), strict=True
        ):
            known = self._rows.get(row)
            for places in () if known is None else known.places:
                low, high = np.searchsorted(places, (start, start + count))
                if low < high:
                    assert high == len(places), "a picture that is seen whole was cut"
                    reach[places[low:high] - start + end - count] = places[-1]
        return in_tables([replace(each, reach=reach) for each in batch.tables])

    def _encoding(self, row: _Row, index: int) -> Tensor:
        """[levels, tokens, hidden size]: what the tower makes of a row's picture."""
        if (found := row.encodings.get(index)) is not None:
            return found
        picture = row.pictures[index]
        found = self._kept.take(picture.digest)
        if found is not None:
            self.reused += 1
        elif (kept := self._host.take(picture.digest)) is not None:
            found = kept.to(next(self.vision.parameters()).device)
            self.fetched += 1
        else:
            began = time.perf_counter()
            found = self._encode(picture)
            self.encoded += 1
            self._tokens += found.shape[1]
            self._seconds += time.perf_counter() - began
        for digest, encoding in self._kept.put(picture.digest, found):
            if self._host.most:
                self._host.put(digest, encoding.cpu())
        row.encodings[index], row.pictures[index] = found, msgspec.structs.replace(picture, pixels=b"")
        return found

    def _encode(self, picture: Picture) -> Tensor:
        pixels = np.frombuffer(bytearray(picture.pixels), np.uint8).reshape(*picture.shape, 3)
        return self.vision.encode(self._ops.to_device(pixels), picture.layout)


class _Encodings:
    """Encodings by digests, those that were used last at the end.

    Attributes:
        most: The bytes that are kept.
        bytes: Those that they have.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def take(self, digest: bytes) -> Tensor | None:
        """One of them, which is no longer kept."""
        found = self._kept.pop(digest, None)
        if found is not None:
            self.bytes -= found.nbytes
        return found

    def put(self, digest: bytes, encoding: Tensor) -> list[tuple[bytes, Tensor]]:
        """Keeps one; returns those that gave way, maybe itself."""
        self.take(digest)
        self._kept[digest] = encoding
        self.bytes += encoding.nbytes
        dropped = []
        while self.bytes > self.most and self._kept:
            gone = self._kept.popitem(last=False)
            self.bytes -= gone[1].nbytes
            dropped.append(gone)
        return dropped


def _places(step: Step, ends: IntArray) -> IntArray:
    """int64 [T]: the place of each of a step's tokens in its request."""
    return np.arange(len(step.token_ids)) + np.repeat(step.starts - ends + step.counts, step.counts)
