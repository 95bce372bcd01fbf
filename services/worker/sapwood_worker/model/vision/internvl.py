"""The vision part of InternVL: tiles of one size, each with a leading state, four patches to a token.

Source: InternVL 3, OpenGVLab, 2025, as transformers' files have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sapwood_worker.model.vision.encoder import PlainMLP, TwoLinears, shuffled
from sapwood_worker.model.vision.mistral3 import PARTS
from sapwood_worker.model.vision.qwen2_vl import RootNorm
from sapwood_worker.model.vision.tower import CLIP_MEAN, CLIP_STD, Normaliser, Vision, VisionFamily, VisionFiles, attend


def _side(given: Any, usual: int) -> int:
    """The side of a square that a setting gives as one number or as two."""
    sides = given if isinstance(given, list) else [given or usual]
    if len(set(sides)) != 1:
        raise ValueError(f"tiles or patches of {sides} are no squares")
    return int(sides[0])


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, bias: bool, normed: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.projection_layer, self._heads = nn.Linear(width, width), heads
        self.q_norm, self.k_norm = (RootNorm(width) if normed else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        query, key, value = (part.flatten(0, 1).unflatten(-1, (self._heads, -1)) for part in parts)
        result: Tensor = self.projection_layer(attend(query, key, value, [x.shape[1]] * len(x)).view_as(x))
        return result


class _Layer(nn.Module):
    def __init__(self, vision: Mapping[str, Any], width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = _Attention(
            width,
            int(vision.get("num_attention_heads", 16)),
            bias=bool(vision.get("attention_bias", False)),
            normed=bool(vision.get("use_qk_norm", False)),
        )
        self.mlp = PlainMLP(width, int(vision.get("intermediate_size", 4096)), str(vision.get("hidden_act", "gelu")))
        self.layernorm_before, self.layernorm_after = norm(width), norm(width)
        self.lambda_1, self.lambda_2 = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x))
        result: Tensor = x + self.lambda_2 * self.mlp(self.layernorm_after(x))
        return result


class _Patches(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, patch, patch)


class _Embeddings(nn.Module):
    def __init__(self, width: int, patch: int, count: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.empty(1, count + 1, width))
        self.patch_embeddings = _Patches(width, patch)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.patch_embeddings.projection(numbers.to(self.cls_token.dtype)).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.position_embeddings


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[_Layer]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)


class _Tower(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        if not vision.get("use_absolute_position_embeddings", True) or not vision.get("use_mean_pooling", True):
            raise ValueError("a tower without positions, or with a norm at its end, is not supported")
        self.width, eps = int(vision.get("hidden_size", 1024)), float(vision.get("layer_norm_eps", 1e-6))
        self.side, patch = _side(vision.get("image_size"), 448), _side(vision.get("patch_size"), 14)
        self.patches = self.side // patch
        make: type[nn.LayerNorm | RootNorm] = RootNorm if vision.get("norm_type") == "rms_norm" else nn.LayerNorm
        norm = partial(make, eps=eps)
        self.embeddings = _Embeddings(self.width, patch, self.patches**2)
        count = int(vision.get("num_hidden_layers", 24))
        self.encoder = _Layers([_Layer(vision, self.width, norm) for _ in range(count)])

    def forward(self, numbers: Tensor) -> Tensor:
        x: Tensor = self.embeddings(numbers)
        for layer in self.encoder.layer:
            x = layer(x)
        return x


class _Projector(TwoLinears):
    def __init__(self, size: int, out: int, act: str) -> None:
        super().__init__(size, out, act)
        self.layer_norm = nn.LayerNorm(size)


class InternVision(Vision):
    """The vision part of InternVL."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        config = files.config
        chosen = config.get("vision_feature_layer", -1), config.get("vision_feature_select_strategy", "default")
        if chosen != (-1, "default"):
            raise ValueError(f"vision_feature_layer and _select_strategy {chosen} are not supported")
        self.token = files.token("image_token_id")
        self._factor = round(1 / float(config.get("downsample_ratio", 0.5)))
        self._normalise = Normaliser(files.processor, CLIP_MEAN, CLIP_STD)
        self.vision_tower = _Tower(files.vision)
        if not self._factor or self.vision_tower.patches % self._factor:
            raise ValueError("downsample_ratio does not divide the patches of a tile")
        size, act = self.vision_tower.width * self._factor**2, str(config.get("projector_hidden_act", "gelu"))
        self.multi_modal_projector = _Projector(size, int(files.text["hidden_size"]), act)

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        tiles, height, width = shape
        side = self.vision_tower.side
        if not 1 <= tiles <= _MOST_TILES or (height, width) != (side, side):
            raise ValueError(f"{tiles} tiles of {height} x {width} pixels; they have {side} x {side}")
        return tiles * (self.vision_tower.patches // self._factor) ** 2

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        x = self.vision_tower(self._normalise(pixels))[:, 1:]
        project = self.multi_modal_projector
        tokens: Tensor = project(project.layer_norm(shuffled(x, self.vision_tower.patches, self._factor)))
        return tokens.flatten(0, 1)[None]


_MOST_TILES = 64
INTERNVL = VisionFamily("internvl", ("InternVLForConditionalGeneration",), InternVision, PARTS)
