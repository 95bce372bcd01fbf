"""The vision parts of Qwen2-VL and Qwen2.5-VL: patches in blocks of 2 x 2, positions on three axes, videos in pairs of frames.

Sources: Qwen2-VL and Qwen2.5-VL, Alibaba, 2024 and 2025. Qwen2.5's tower computes most layers within windows; patches are put in
the order of their windows for it, and its outputs back. Attention is quadratic in the patches of a picture in the other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sapwood_common.contract.pictures import Clip
from sapwood_worker.model.vision.tower import (
    CLIP_MEAN,
    CLIP_STD,
    IntArray,
    Normaliser,
    Vision,
    VisionFamily,
    VisionFiles,
    activation,
    attend,
    turn,
)
from sapwood_worker.records.pictures import Picture


class PatchGrid:
    """How a picture or a video becomes patches, in blocks whose patches become one token.

    Args:
        patch: Pixels of a patch's side.
        merge: Patches of a block's side.
        frames: Frames of a patch. The one frame of a picture is taken as often, and the last one of a video until they fit.
    """

    def __init__(self, patch: int, merge: int, frames: int) -> None:
        self.patch, self.merge, self.frames = patch, merge, frames

    def of(self, shape: Sequence[int], *, video: bool = False) -> tuple[int, int, int]:
        """Layers of frames, and rows and columns of patches. Raises ValueError if it is not made of whole blocks."""
        tiles, height, width = shape
        side = self.patch * self.merge
        if (tiles != 1 and not video) or not tiles or height % side or width % side or not height or not width:
            raise ValueError(f"a picture of {tiles} x {height} x {width} pixels is not made of blocks of {side}")
        return -(-tiles // self.frames), height // self.patch, width // self.patch

    def cut(self, numbers: Tensor) -> Tensor:
        """[frames, 3, height, width] -> [patches, 3 * frames * patch * patch], layer after layer, block after block."""
        patch, merge = self.patch, self.merge
        missing = -len(numbers) % self.frames
        if missing:
            numbers = torch.cat((numbers, numbers[-1:].expand(missing, -1, -1, -1)))
        count, channels, height, width = numbers.shape
        split = height // patch // merge, merge, patch, width // patch // merge, merge, patch
        blocks = numbers.view(count // self.frames, self.frames, channels, *split)
        return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * self.frames * patch * patch)

    def places(self, rows: int, columns: int) -> IntArray:
        """int64 [patches, 2]: each patch's row and column, block after block."""
        merge = self.merge
        places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
        return places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2).reshape(-1, 2)


class Run(NamedTuple):
    """Tokens of a picture or a video that have one grid of positions.

    Attributes:
        places: Theirs in the prompt, rising.
        times: The position of each layer of rows and columns, from 0.
        rows, columns: Of tokens.
    """

    places: IntArray
    times: IntArray
    rows: int
    columns: int


def three_axes(length: int, runs: Iterable[Run]) -> IntArray:
    """Positions of text, pictures and videos on the axes of time, height and width, as :meth:`Vision.positions` returns them.

    A text's token has the same position on all axes. What follows a picture or a video has positions beyond all of it, on all
    axes: so the models were trained. (transformers 5.3 to 5.24 leave the axis of time out there, except for what is generated.)

    Args:
        length: Tokens up to the end of the last picture.
        runs: In the order of their places.
    """
    positions = np.zeros((3, length + 1), np.int64)
    place = following = 0
    for places, times, rows, columns in runs:
        first, size = int(places[0]), rows * columns
        positions[:, place:first] = np.arange(following, following + first - place)
        following += first - place
        index = np.arange(len(places))
        axes = np.stack((times[index // size], index % size // columns, index % columns))
        positions[:, places] = following + axes
        place, following = int(places[-1]) + 1, following + int(axes.max()) + 1
    positions[:, place:] = np.arange(following, following + length + 1 - place)
    return positions


def axial_angles(head_dim: int, places: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of patches by row and column.

    Args:
        head_dim: Size of a head.
        places: int64 [patches, 2].
        device: Where they are wanted.

    Returns:
        float32 [patches, head_dim] each.
    """
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (10_000.0 ** (quarter / (head_dim // 2)))
    angles = (torch.from_numpy(places).to(device).float()[..., None] * frequencies).flatten(1)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


class RootNorm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(x.dtype)


class QwenAttention(nn.Module):
    """Attention among patches, with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self._heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        every = self.qkv(x).unflatten(-1, (3, self._heads, -1))
        query, key = turn(every[:, :2].flatten(1, 2), *angles).view(len(x), 2, self._heads, -1).unbind(1)
        result: Tensor = self.proj(attend(query, key, every[:, 2], lengths))
        return result


class PatchEmbedding(nn.Module):
    """Patches to the tower's width. The checkpoint has its matrix in the form of a convolution's."""

    def __init__(self, grid: PatchGrid, width: int, *, bias: bool) -> None:
        super().__init__()
        size = grid.frames, grid.patch, grid.patch
        self.proj = nn.Conv3d(3, width, size, size, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        return functional.linear(patches.to(self.proj.weight.dtype), self.proj.weight.flatten(1), self.proj.bias)


class _GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj, self._act = nn.Linear(inner, width), activation(act)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return result


class _PlainMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self._act = nn.Linear(width, inner), nn.Linear(inner, width), activation(act)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self._act(self.fc1(x)))
        return result


class Block(nn.Module):
    """A layer: attention and MLP, each behind a norm."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.norm1(x), angles, lengths)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class _Merger(nn.Module):
    def __init__(self, norm: nn.Module, width: int, merged: int, out: int) -> None:
        super().__init__()
        self.ln_q = norm
        self.mlp = nn.Sequential(nn.Linear(width * merged, width * merged), nn.GELU(), nn.Linear(width * merged, out))
        self._merged = merged

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(self.ln_q(x).view(len(x) // self._merged, -1))
        return result


class QwenVision(Vision):
    """What Qwen's vision parts share: patches, tokens and positions.

    Args:
        files: The model's settings.
        mean, std: The processor's, unless its settings give them.
    """

    def __init__(self, files: VisionFiles, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.token = files.token("image_token_id")
        if files.config.get("video_token_id") is not None:
            self.video_token = files.token("video_token_id")
        vision = files.vision
        frames, patch = int(vision.get("temporal_patch_size", 2)), int(vision["patch_size"])
        self._grid = PatchGrid(patch, int(vision.get("spatial_merge_size", 2)), frames)
        self._normalise = Normaliser(files.processor, mean, std)

    def token_of(self, layout: Sequence[int]) -> int:
        if layout and self.video_token is None:
            raise ValueError("the model takes no videos")
        return self.token if self.video_token is None or not layout else self.video_token

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        if layout:
            self.token_of(layout)
            Clip.of(layout)
        layers, rows, columns = self._tokens(shape, layout)
        return layers * rows * columns

    def positions(self, length: int, pictures: Sequence[Picture], places: Sequence[IntArray]) -> IntArray | None:
        runs = (self._runs(each, where) for each, where in zip(pictures, places, strict=True))
        return three_axes(length, (run for some in runs for run in some))

    def _tokens(self, shape: Sequence[int], layout: Sequence[int]) -> tuple[int, int, int]:
        layers, rows, columns = self._grid.of(shape, video=bool(layout))
        return layers, rows // self._grid.merge, columns // self._grid.merge

    def _runs(self, picture: Picture, places: IntArray) -> Iterator[Run]:
        """One for a picture or a video; or, where text stands between the layers of a video, one for each."""
        layers, rows, columns = self._tokens(picture.shape, picture.layout)
        yield Run(places, np.arange(layers), rows, columns)


class Qwen2Vision(QwenVision):
    """The vision part of Qwen2-VL, or, with windows, of Qwen2.5-VL."""

    def __init__(self, files: VisionFiles, *, windows: bool) -> None:
        super().__init__(files, CLIP_MEAN, CLIP_STD)
        vision = files.vision
        width = int(vision["hidden_size" if windows else "embed_dim"])
        heads, merged = int(vision["num_heads"]), self._grid.merge**2
        self._head_dim = width // heads
        self.patch_embed = PatchEmbedding(self._grid, width, bias=False)
        out = int(vision["out_hidden_size"] if windows else vision.get("hidden_size") or files.text["hidden_size"])
        self._window = 0
        self._per_second = int(vision.get("tokens_per_second", 4)) if windows else 0
        if windows:
            inner, act = int(vision["intermediate_size"]), str(vision.get("hidden_act", "silu"))
            self._window = int(vision.get("window_size", 112)) // self._grid.merge // self._grid.patch
            if not self._window:
                raise ValueError("window_size is less than a block of patches")
        else:
            inner, act = int(width * vision.get("mlp_ratio", 4)), str(vision.get("hidden_act", "quick_gelu"))
        norm: Callable[[int], nn.Module] = RootNorm if windows else partial(nn.LayerNorm, eps=1e-6)
        self.blocks = nn.ModuleList(
            Block(
                (norm(width), norm(width)),
                QwenAttention(width, heads),
                (_GatedMLP if windows else _PlainMLP)(width, inner, act),
            )
            for _ in range(int(vision["depth"]))
        )
        self._full = (
            frozenset(vision.get("fullatt_block_indexes") or ()) if windows else frozenset(range(len(self.blocks)))
        )
        self.merger = _Merger(norm(width), width, merged, out)

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        layers, rows, columns = self._grid.of(pixels.shape[:3], video=bool(layout))
        merged, full = self._grid.merge**2, [rows * columns] * layers
        x = self.patch_embed(self._grid.cut(self._normalise(pixels)))
        places, lengths, order = np.tile(self._grid.places(rows, columns), (layers, 1)), full, None
        if self._window:
            one, lengths = _windows(rows // self._grid.merge, columns // self._grid.merge, self._window, merged)
            order, lengths = (np.arange(layers)[:, None] * len(one) + one).ravel(), lengths * layers
            x = x.unflatten(0, (-1, merged))[torch.from_numpy(order).to(x.device)].flatten(0, 1)
            places = places.reshape(-1, merged, 2)[order].reshape(-1, 2)
        angles = axial_angles(self._head_dim, places, x.device)
        for index, block in enumerate(self.blocks):
            x = block(x, angles, full if index in self._full else lengths)
        tokens: Tensor = self.merger(x)
        if order is not None:
            tokens = tokens[torch.from_numpy(np.argsort(order)).to(x.device)]
        return tokens[None]

    def _runs(self, picture: Picture, places: IntArray) -> Iterator[Run]:
        if not self._per_second or not picture.layout:
            yield from super()._runs(picture, places)
            return
        # A layer lies as far behind the one before as the seconds between them take positions; in float32, as transformers
        # computes it.
        layers, rows, columns = self._tokens(picture.shape, picture.layout)
        clip = Clip.of(picture.layout)
        seconds = np.float32(self._grid.frames / (picture.shape[0] / clip.total * clip.fps))
        times = (np.arange(layers, dtype=np.float32) * (np.float32(self._per_second) * seconds)).astype(np.int64)
        yield Run(places, times, rows, columns)


def _windows(rows: int, columns: int, window: int, merged: int) -> tuple[IntArray, list[int]]:
    """The order of tokens by windows of ``window`` x ``window``, and how many patches each window has. Windows at the edges
    are smaller and come first: windows of one size side by side are computed together."""
    tokens = np.arange(rows * columns).reshape(rows, columns)
    parts = [
        tokens[row : row + window, column : column + window].ravel()
        for row in range(0, rows, window)
        for column in range(0, columns, window)
    ]
    parts.sort(key=len)
    return np.concatenate(parts), [len(part) * merged for part in parts]


_PREFIXES: Mapping[str, str] = {"visual.": "", "model.visual.": ""}


def _check(vision: Mapping[str, Any]) -> None:
    if int(vision.get("in_channels", vision.get("in_chans", 3))) != 3:
        raise ValueError("a tower of other than three channels is not supported")


def _build(files: VisionFiles, *, windows: bool) -> Vision:
    _check(files.vision)
    return Qwen2Vision(files, windows=windows)


QWEN2_VL = VisionFamily(
    "qwen2_vl", ("Qwen2VLForConditionalGeneration",), lambda files: _build(files, windows=False), _PREFIXES
)
QWEN2_5_VL = VisionFamily(
    "qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration",), lambda files: _build(files, windows=True), _PREFIXES
)
