"""Towers of one size of picture that several families have: SigLIP's, CLIP's and what was made of them.

Each tile is a sequence of its own: O(tiles * patches^2).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sapwood_worker.model.vision.tower import activation, attend


class EncoderAttention(nn.Module):
    """Attention among the patches of a tile."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """[tiles, patches, width] -> the same shape."""
        query, key, value = (
            part(x).flatten(0, 1).unflatten(-1, (self._heads, -1)) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        result: Tensor = self.out_proj(attend(query, key, value, [x.shape[1]] * len(x)).view_as(x))
        return result


class PlainMLP(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self._act = nn.Linear(width, inner), nn.Linear(inner, width), activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        result: Tensor = self.fc2(self._act(self.fc1(x)))
        return result


class EncoderLayer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, inner: int, act: str, eps: float) -> None:
        super().__init__()
        self.self_attn, self.mlp = EncoderAttention(width, heads), PlainMLP(width, inner, act)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[tiles, patches, width] -> the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        result: Tensor = x + self.mlp(self.layer_norm2(x))
        return result


class _Layers(nn.Module):
    def __init__(self, count: int, make: partial[EncoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))


class _Embeddings(nn.Module):
    def __init__(self, width: int, side: int, patch: int, *, clip: bool, by_share: bool) -> None:
        super().__init__()
        self._places = _places_by_share(side // patch) if by_share else None
        self.patch_embedding = nn.Conv2d(3, width, patch, patch, bias=not clip)
        self.position_embedding = nn.Embedding((side // patch) ** 2 + clip, width)
        if clip:
            self.class_embedding = nn.Parameter(torch.empty(width))
        self._clip = clip

    def forward(self, numbers: Tensor) -> Tensor:
        x: Tensor = self.patch_embedding(numbers.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        if self._clip:
            x = torch.cat((self.class_embedding.expand(len(x), 1, -1), x), 1)
        positions = self.position_embedding.weight
        return x + (positions if self._places is None else positions[self._places])


def _places_by_share(side: int) -> list[int]:
    """The learned position of each patch of a square. In float32, as transformers computes it: where a share of the side is
    rounded down, two neighbours have one position."""
    with torch.device("cpu"):
        borders = torch.arange(1 / side, 1.0, 1 / side)
        shares = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
        along = torch.bucketize(shares.clamp(max=1.0 - 1e-6), borders, right=True).tolist()
    return [down * side + right for down in along for right in along]


class PatchEncoder(nn.Module):
    """A tower of SigLIP's or CLIP's kind, without what pools its outputs.

    Args:
        vision: ``vision_config``.
        taken: Which of the states to return: -1 is what the last layer gives, -2 what the one before it gives.
        normed: Whether the last norm follows the last layer.
        by_share: Whether a patch's place is found by its share of the side, as Idefics' towers do, which rounds.

    Attributes:
        side: Pixels of a tile's side.
        patches: Patches of a tile's side.
        width: Numbers of a state.
        leads: States of a tile before those of its patches.
    """

    def __init__(self, vision: Mapping[str, Any], taken: int, *, normed: bool, by_share: bool = False) -> None:
        super().__init__()
        clip = vision.get("model_type") == "clip_vision_model"
        self.width, self.side = int(vision.get("hidden_size", 768)), int(vision.get("image_size", 224))
        patch, layers = int(vision.get("patch_size", 32 if clip else 16)), int(vision.get("num_hidden_layers", 12))
        if self.side % patch or not -layers <= taken <= -1:
            raise ValueError(f"a tower of {layers} layers, tiles of {self.side} pixels and patches of {patch}")
        self.patches, self.leads = self.side // patch, int(clip)
        act = str(vision.get("hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh"))
        eps = float(vision.get("layer_norm_eps", 1e-5 if clip else 1e-6))
        heads, inner = int(vision.get("num_attention_heads", 12)), int(vision.get("intermediate_size", 3072))
        self.embeddings = _Embeddings(self.width, self.side, patch, clip=clip, by_share=by_share)
        make = partial(EncoderLayer, self.width, heads, inner, act, eps)
        # Layers behind what is taken are not built; the checkpoint's tensors of them are left unread.
        self.encoder = _Layers(layers + 1 + taken, make)
        if clip:
            self.pre_layrnorm = nn.LayerNorm(self.width, eps=eps)
        if normed:
            self.post_layernorm = nn.LayerNorm(self.width, eps=eps)
        self._clip, self._normed = clip, normed

    def forward(self, numbers: Tensor) -> Tensor:
        """float32 [tiles, 3, side, side] -> [tiles, leads + patches, width]."""
        x: Tensor = self.embeddings(numbers)
        if self._clip:
            x = self.pre_layrnorm(x)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x) if self._normed else x


class TwoLinears(nn.Module):
    """A projector of two matrices."""

    def __init__(self, size: int, out: int, act: str, *, bias: bool = True) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(size, out, bias=bias), nn.Linear(out, out, bias=bias)
        self._act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., out]."""
        result: Tensor = self.linear_2(self._act(self.linear_1(x)))
        return result


def shuffled(x: Tensor, side: int, factor: int) -> Tensor:
    """Patches joined to blocks, each side of a tile by a factor: [tiles, side * side, width] -> fewer and wider ones."""
    tiles, _, width = x.shape
    x = x.view(tiles, side // factor, factor, side // factor, factor * width).permute(0, 1, 3, 2, 4)
    return x.reshape(tiles, (side // factor) ** 2, factor * factor * width)
