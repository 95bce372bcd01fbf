"""Videos for Qwen's VL models: two frames to a row of patches; Qwen3 gets the time of each pair as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sapwood_common.contract.pictures import Clip
from sapwood_tokenizer.pictures.families.family import PictureSettings, VideoFamily

_USUAL_FPS, _LEAST, _MOST = 2.0, 4, 768
_MOST_RATIO = 200


class Qwen2Videos(VideoFamily):
    """Videos of Qwen2-VL and Qwen2.5-VL. Frames and sizes are those of transformers' ``Qwen2VLVideoProcessor`` that samples
    2 frames a second, as Qwen's own tools do, unless its settings say otherwise.

    Args:
        settings: The model's.
    """

    _sides = 128 * 28 * 28, 768 * 28 * 28

    def __init__(self, settings: PictureSettings) -> None:
        given, vision = settings.video_processor, settings.vision
        self.marker = self.token = settings.text("video_token_id")
        self.resample = settings.resample
        self._pair = int(given.get("temporal_patch_size") or vision.get("temporal_patch_size", 2))
        patch = int(given.get("patch_size") or vision.get("patch_size", 14))
        self._side = patch * int(given.get("merge_size") or vision.get("spatial_merge_size", 2))
        size = given.get("size") if isinstance(given.get("size"), dict) else {}
        assert isinstance(size, dict)
        self._smallest = int(given.get("min_pixels") or size.get("shortest_edge") or self._sides[0])
        self._largest = int(given.get("max_pixels") or size.get("longest_edge") or self._sides[1])
        self._fps = float(given.get("fps") or _USUAL_FPS)
        self._least, self._most = int(given.get("min_frames") or _LEAST), int(given.get("max_frames") or _MOST)

    def sample(self, total: int, fps: float, most: int) -> Sequence[int]:
        pair = self._pair
        top = min(self._most, most, total) // pair * pair
        count = math.floor(min(max(total / fps * self._fps, self._least), top, total) / pair) * pair
        if not count:
            return range(total)
        return [index * total // count for index in range(count)]

    def frame_size(self, frames: int, width: int, height: int, most_pixels: int) -> tuple[int, int]:
        rows, columns = whole_blocks(
            height, width, self._side, self._smallest, max(self._smallest, min(self._largest, most_pixels // frames))
        )
        return columns, rows

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        return self.token * (-(-shape[0] // self._pair) * self._tokens(shape))

    def _tokens(self, shape: tuple[int, ...]) -> int:
        """Tokens of a pair of frames."""
        _, height, width = shape
        return height // self._side * (width // self._side)


class Qwen3Videos(Qwen2Videos):
    """Videos of Qwen3-VL, as transformers' ``Qwen3VLProcessor`` has them: ``<1.5 seconds>`` before the tokens of a pair.

    Args:
        settings: The model's.
    """

    _sides = 128 * 32 * 32, 768 * 32 * 32

    def __init__(self, settings: PictureSettings) -> None:
        super().__init__(settings)
        self._begin, self._end = settings.text("vision_start_token_id"), settings.text("vision_end_token_id")

    def sample(self, total: int, fps: float, most: int) -> Sequence[int]:
        count = min(max(int(total / fps * self._fps), self._least), self._most, most, total)
        return _spread(total, count)

    def frame_size(self, frames: int, width: int, height: int, most_pixels: int) -> tuple[int, int]:
        """As for Qwen2, but the bounds are of all frames together."""
        side, frames = self._side, max(frames, self._pair)
        if height < side or width < side:
            grow = max(side / height, side / width)
            height, width = int(height * grow), int(width * grow)
        most = max(self._smallest, min(self._largest, most_pixels))
        rows, columns = whole_blocks(
            height, width, side, self._smallest, most, frames, round(frames / self._pair) * self._pair
        )
        return columns, rows

    def expand(self, shape: tuple[int, ...], layout: tuple[int, ...]) -> str:
        clip, pair = Clip.of(layout), self._pair
        times = [index / clip.fps for index in _spread(clip.total, shape[0])]
        times += times[-1:] * (-len(times) % pair)
        shown = self._begin + self.token * self._tokens(shape) + self._end
        return "".join(
            f"<{(times[first] + times[first + pair - 1]) / 2:.1f} seconds>{shown}"
            for first in range(0, len(times), pair)
        )


def _spread(total: int, count: int) -> list[int]:
    """``count`` frames from the first to the last one."""
    return [int(each) for each in np.linspace(0, total - 1, count).round()]


def whole_blocks(
    height: int, width: int, side: int, least: int, most: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Height and width with whole blocks that are nearest to a picture's, with about its ratio of sides, and with ``least`` to
    ``most`` pixels; as transformers' processors have it.

    Args:
        height, width: The picture's.
        side: Pixels of a block's side.
        least, most: Pixels of all frames.
        frames: How many of this size there are.
        counted: And how many count where ``least`` and ``most`` are looked at: frames are rounded to pairs there.

    Raises:
        ValueError: It is too long for its width.
    """
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise ValueError(f"one side is more than {_MOST_RATIO} times the other")
    rows, columns = round(height / side) * side, round(width / side) * side
    if counted * rows * columns > most:
        shrink = math.sqrt(frames * height * width / most)
        rows, columns = (max(side, math.floor(each / shrink / side) * side) for each in (height, width))
    elif counted * rows * columns < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(each * grow / side) * side for each in (height, width))
    return rows, columns
