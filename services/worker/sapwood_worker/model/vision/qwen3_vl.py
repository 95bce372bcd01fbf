"""The vision part of Qwen3-VL: learned positions that are interpolated, and outputs of its middle for the first layers of the
language model (DeepStack).

Source: Qwen3-VL, Alibaba, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from sapwood_worker.model.vision.qwen2_vl import Block, PatchEmbedding, QwenAttention, QwenVision, Run, axial_angles
from sapwood_worker.model.vision.tower import HALF, IntArray, VisionFamily, VisionFiles, activation
from sapwood_worker.records.pictures import Picture


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self._act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_fc2(self._act(self.linear_fc1(x)))
        return result


class _Merger(nn.Module):
    """Blocks of patches to tokens; the norm is of patches, or of whole blocks."""

    def __init__(self, width: int, merged: int, out: int, *, of_blocks: bool) -> None:
        super().__init__()
        inner = width * merged
        self.norm = nn.LayerNorm(inner if of_blocks else width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(inner, inner), nn.Linear(inner, out)
        self._inner, self._of_blocks = inner, of_blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._inner)) if self._of_blocks else self.norm(x).view(-1, self._inner)
        result: Tensor = self.linear_fc2(nn.functional.gelu(self.linear_fc1(x)))
        return result


class Qwen3Vision(QwenVision):
    """The vision part of Qwen3-VL."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__(files, HALF, HALF)
        vision = files.vision
        width, heads, merged = int(vision["hidden_size"]), int(vision["num_heads"]), self._grid.merge**2
        inner, out = int(vision["intermediate_size"]), int(vision["out_hidden_size"])
        act, count = str(vision.get("hidden_act", "gelu_pytorch_tanh")), int(vision["num_position_embeddings"])
        norm = partial(nn.LayerNorm, eps=1e-6)
        self._head_dim, self._side = width // heads, int(count**0.5)
        self.patch_embed = PatchEmbedding(self._grid, width, bias=True)
        self.pos_embed = nn.Embedding(count, width)
        self.blocks = nn.ModuleList(
            Block((norm(width), norm(width)), QwenAttention(width, heads), _MLP(width, inner, act))
            for _ in range(int(vision["depth"]))
        )
        self.merger = _Merger(width, merged, out, of_blocks=False)
        self._taken = [int(index) for index in vision.get("deepstack_visual_indexes") or ()]
        if self._taken != sorted(set(self._taken)) or not set(self._taken) <= set(range(len(self.blocks))):
            raise ValueError(f"deepstack_visual_indexes is {self._taken!r:.60}; it can be rising indexes of layers")
        self.deepstack_merger_list = nn.ModuleList(_Merger(width, merged, out, of_blocks=True) for _ in self._taken)
        self.levels = 1 + len(self._taken)

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        layers, rows, columns = self._grid.of(pixels.shape[:3], video=bool(layout))
        places = np.tile(self._grid.places(rows, columns), (layers, 1))
        x = self.patch_embed(self._grid.cut(self._normalise(pixels)))
        x = x + self._positions_of(places, rows, columns).to(x.dtype)
        angles, lengths = axial_angles(self._head_dim, places, x.device), [rows * columns] * layers
        taken: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x, angles, lengths)
            if index in self._taken:
                taken.append(self.deepstack_merger_list[len(taken)](x))
        return torch.stack([self.merger(x), *taken])

    def _runs(self, picture: Picture, places: IntArray) -> Iterator[Run]:
        layers, rows, columns = self._tokens(picture.shape, picture.layout)
        for part in places.reshape(layers, -1):  # the time of each stands before it as text
            yield Run(part, np.zeros(1, np.int64), rows, columns)

    def _positions_of(self, places: IntArray, rows: int, columns: int) -> Tensor:
        """[patches, width]: the learned positions of a square, spread over the picture, between its four nearest."""
        weight = self.pos_embed.weight
        sides = [
            (places[:, axis].astype(np.float32) * np.float32(self._side - 1)) / np.float32(max(size - 1, 1))
            for axis, size in enumerate((rows, columns))
        ]
        found = torch.zeros(len(places), weight.shape[1], dtype=torch.float32, device=weight.device)
        low = [np.floor(side).astype(np.int64) for side in sides]
        for down in (0, 1):
            for right in (0, 1):
                at = [np.minimum(low[axis] + step, self._side - 1) for axis, step in enumerate((down, right))]
                shares = [
                    np.maximum(1 - np.abs(sides[axis] - low[axis] - step), 0) for axis, step in enumerate((down, right))
                ]
                index = torch.from_numpy(at[0] * self._side + at[1]).to(weight.device)
                share = torch.from_numpy((shares[0] * shares[1]).astype(np.float32)).to(weight.device)
                found += weight.index_select(0, index).float() * share[:, None]
        return found


QWEN3_VL = VisionFamily(
    "qwen3_vl",
    ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    Qwen3Vision,
    {"visual.": "", "model.visual.": ""},
)
