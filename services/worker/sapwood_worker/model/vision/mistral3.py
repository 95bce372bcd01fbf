"""The vision part of Mistral 3 and Pixtral: a picture of its own size, rotary positions by row and column, rows of tokens.

Sources: Pixtral 12B and Mistral Small 3.1, Mistral AI, 2024 and 2025.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sapwood_worker.model.vision.encoder import TwoLinears
from sapwood_worker.model.vision.qwen2_vl import RootNorm
from sapwood_worker.model.vision.tower import (
    CLIP_MEAN,
    CLIP_STD,
    Normaliser,
    Vision,
    VisionFamily,
    VisionFiles,
    activation,
    attend,
    turn,
)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self._heads = heads

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self._heads, -1)) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        result: Tensor = self.o_proj(attend(turn(query, *angles), turn(key, *angles), value, [len(x)]))
        return result


class _GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj, self._act = nn.Linear(inner, width, bias=False), activation(act)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, act: str) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RootNorm(width, 1e-5), RootNorm(width, 1e-5)
        self.attention, self.feed_forward = _Attention(width, heads), _GatedMLP(width, inner, act)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[_Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class PixtralTower(nn.Module):
    """Pixtral's tower.

    Args:
        vision: ``vision_config``.

    Attributes:
        patch: Pixels of a patch's side.
        width: Numbers of a state.
    """

    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        self.width, self.patch = int(vision.get("hidden_size", 1024)), int(vision.get("patch_size", 16))
        heads, inner = int(vision.get("num_attention_heads", 16)), int(vision.get("intermediate_size", 4096))
        rope = vision.get("rope_parameters") or {}
        theta = float(rope.get("rope_theta") or vision.get("rope_theta") or 10_000.0)
        self._frequencies = [theta ** (-i / (self.width // heads)) for i in range(0, self.width // heads, 2)]
        self.patch_conv = nn.Conv2d(3, self.width, self.patch, self.patch, bias=False)
        self.ln_pre = RootNorm(self.width, 1e-5)
        act = str(vision.get("hidden_act", "gelu"))
        count = int(vision.get("num_hidden_layers", 24))
        self.transformer = _Layers([_Layer(self.width, heads, inner, act) for _ in range(count)])

    def forward(self, numbers: Tensor) -> Tensor:
        """float32 [1, 3, height, width] -> [patches, width], row after row."""
        grid: Tensor = self.patch_conv(numbers.to(self.patch_conv.weight.dtype))[0]
        _, rows, columns = grid.shape
        x = self.ln_pre(grid.flatten(1).T)
        angles = self._angles(rows, columns, x.device)
        for layer in self.transformer.layers:
            x = layer(x, angles)
        result: Tensor = x
        return result

    def _angles(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        frequencies = torch.tensor(self._frequencies, device=device)
        down = torch.arange(rows, device=device).float()[:, None] * frequencies[0::2]
        right = torch.arange(columns, device=device).float()[:, None] * frequencies[1::2]
        both = torch.cat((down.repeat_interleave(columns, 0), right.repeat(rows, 1)), -1)
        both = torch.cat((both, both), -1)
        return both.cos(), both.sin()


class _Merger(nn.Module):
    def __init__(self, width: int, merge: int) -> None:
        super().__init__()
        self.merging_layer = nn.Linear(width * merge * merge, width, bias=False)


class _Projector(TwoLinears):
    def __init__(self, width: int, out: int, act: str, *, merge: int, eps: float, bias: bool) -> None:
        super().__init__(width, out, act, bias=bias)
        self.norm, self.patch_merger = RootNorm(width, eps), _Merger(width, merge)


class Mistral3Vision(Vision):
    """The vision part of Mistral 3."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        if files.vision.get("model_type", "pixtral") != "pixtral" or files.config.get("vision_feature_layer", -1) != -1:
            raise ValueError("only Pixtral's tower is supported, and only with vision_feature_layer -1")
        self.token = files.token("image_token_index", "image_token_id")
        self._merge = int(files.config.get("spatial_merge_size", 2))
        self._normalise = Normaliser(files.processor, CLIP_MEAN, CLIP_STD)
        self.vision_tower = PixtralTower(files.vision)
        self.multi_modal_projector = _Projector(
            self.vision_tower.width,
            int(files.text["hidden_size"]),
            str(files.config.get("projector_hidden_act", "gelu")),
            merge=self._merge,
            eps=float(files.text.get("rms_norm_eps", 1e-6)),
            bias=bool(files.config.get("multimodal_projector_bias", False)),
        )

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        tiles, height, width = shape
        side = self.vision_tower.patch * self._merge
        if tiles != 1 or not height or not width or height % side or width % side:
            raise ValueError(f"a picture of {tiles} x {height} x {width} pixels is not made of blocks of {side}")
        return height // side * (width // side)

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        _, height, width, _ = pixels.shape
        patch, merge, project = self.vision_tower.patch, self._merge, self.multi_modal_projector
        x: Tensor = project.norm(self.vision_tower(self._normalise(pixels)))
        blocks = x.view(height // patch // merge, merge, width // patch // merge, merge, -1).permute(0, 2, 4, 1, 3)
        joined = functional.linear(blocks.flatten(2).flatten(0, 1), project.patch_merger.merging_layer.weight)
        tokens: Tensor = project(joined)
        return tokens[None]


PARTS: Mapping[str, str] = {
    start + part: part for start in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
}
"""How checkpoints of LLaVA's kind name the parts."""
MISTRAL3 = VisionFamily("mistral3", ("Mistral3ForConditionalGeneration",), Mistral3Vision, PARTS)
