"""The vision part of Llama 4: tiles with rotary positions and a state behind the patches, four patches to a token.

Source: Llama 4, Meta, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sapwood_worker.model.vision.encoder import PlainMLP, shuffled
from sapwood_worker.model.vision.tower import HALF, Vision, VisionFamily, VisionFiles, attend

_MOST_TILES = 65


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self._heads = heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[tiles, states, width] -> the same shape. Neighbours in a head are turned together."""
        query, key, value = (
            part(x).unflatten(-1, (self._heads, -1)) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        turned = []
        for part in (query, key):
            even, odd = part.float().unflatten(-1, (-1, 2)).unbind(-1)
            pair = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
            turned.append(pair.flatten(-2).to(part.dtype).flatten(0, 1))
        result: Tensor = self.o_proj(
            attend(turned[0], turned[1], value.flatten(0, 1), [x.shape[1]] * len(x)).view_as(x)
        )
        return result


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(width, heads), PlainMLP(width, inner, "gelu")
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Layers(nn.Module):
    def __init__(self, count: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, heads, inner) for _ in range(count))


class _Unfolded(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, width, bias=False)


class _AdapterMLP(nn.Module):
    def __init__(self, size: int, middle: int, out: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, middle, bias=False), nn.Linear(out, out, bias=False)


class _Adapter(nn.Module):
    def __init__(self, size: int, middle: int, out: int) -> None:
        super().__init__()
        self.mlp = _AdapterMLP(size, middle, out)


class _Tower(nn.Module):
    """The tower, with the names of its checkpoints."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        vision = files.vision
        self.width, self.side = int(vision.get("hidden_size", 768)), int(vision.get("image_size", 448))
        self.patch, self.heads = int(vision.get("patch_size", 14)), int(vision.get("num_attention_heads", 16))
        inner = int(vision.get("intermediate_size", 5632))
        self.factor = round(1 / float(vision.get("pixel_shuffle_ratio", 0.5)))
        self.patches = self.side // self.patch
        if self.side % self.patch or not self.factor or self.patches % self.factor or self.width % (4 * self.heads):
            raise ValueError("image_size, patch_size, pixel_shuffle_ratio or the size of a head do not fit each other")
        rope = vision.get("rope_parameters")
        self.theta = float((rope or {}).get("rope_theta") or vision.get("rope_theta", 10_000.0))
        self.patch_embedding = _Unfolded(3 * self.patch**2, self.width)
        self.class_embedding = nn.Parameter(torch.empty(self.width))
        self.positional_embedding_vlm = nn.Parameter(torch.empty(self.patches**2 + 1, self.width))
        self.layernorm_pre, self.layernorm_post = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.model = _Layers(int(vision.get("num_hidden_layers", 34)), self.width, self.heads, inner)
        middle, out = int(vision.get("projector_input_dim", 4096)), int(vision.get("projector_output_dim", 4096))
        if self.width * self.factor**2 != inner or middle != out:
            raise ValueError("intermediate_size or projector_input_dim does not fit the adapter")
        self.vision_adapter = _Adapter(inner, middle, out)

    def forward(self, numbers: Tensor) -> Tensor:
        """float32 [tiles, 3, side, side] -> [tiles, tokens, projector_output_dim]."""
        patches = functional.unfold(numbers, self.patch, stride=self.patch).transpose(1, 2)
        x: Tensor = self.patch_embedding.linear(patches.to(self.class_embedding.dtype))
        x = torch.cat((x, self.class_embedding.expand(len(x), 1, -1)), 1) + self.positional_embedding_vlm
        x, (cos, sin) = self.layernorm_pre(x), self._angles(x.device)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        x = shuffled(self.layernorm_post(x)[:, :-1], self.patches, self.factor)
        mlp = self.vision_adapter.mlp
        return functional.gelu(mlp.fc2(functional.gelu(mlp.fc1(x))))

    def _angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """float32 [patches + 1, 1, half a head] each: the first half turns by the column, the other by the row; the state behind
        the patches is not turned."""
        half = self.width // self.heads // 2
        frequencies = 1.0 / self.theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=device) / half)
        place = torch.arange(self.patches**2, device=device)
        angles = torch.cat(
            [(along + 1)[:, None] * frequencies for along in (place % self.patches, place // self.patches)], -1
        )
        angles = functional.pad(angles, (0, 0, 0, 1))[:, None]
        return angles.cos(), angles.sin()


class _Projector(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(size, out, bias=False)


class Llama4Vision(Vision):
    """The vision part of Llama 4."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        self.token = files.token("image_token_index", "image_token_id")
        self.vision_model = _Tower(files)
        size = int(files.vision.get("vision_output_dim", 7680))
        self.multi_modal_projector = _Projector(size, int(files.text.get("hidden_size", 5120)))
        self._factor = float(files.processor.get("rescale_factor") or 1 / 255)
        mean, std = (files.processor.get(name) or list(HALF) for name in ("image_mean", "image_std"))
        if len({*mean}) != 1 or len({*std}) != 1 or not std[0]:
            raise ValueError("image_mean and image_std are one number for all channels, and image_std is not 0")
        self._mean, self._std = float(mean[0]), float(std[0])

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        tiles, height, width = shape
        tower = self.vision_model
        if not 1 <= tiles <= _MOST_TILES or (height, width) != (tower.side, tower.side):
            raise ValueError(f"{tiles} tiles of {height} x {width} pixels; they have {tower.side} x {tower.side}")
        return tiles * (tower.patches // tower.factor) ** 2

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        # In bfloat16, as the model was trained.
        numbers = (pixels.to(torch.bfloat16) * self._factor - self._mean) / self._std
        x = self.vision_model(numbers.float().permute(0, 3, 1, 2))
        tokens: Tensor = self.multi_modal_projector.linear_1(x)
        return tokens.flatten(0, 1)[None]


LLAMA4 = VisionFamily(
    "llama4",
    ("Llama4ForConditionalGeneration",),
    Llama4Vision,
    {f"{start}{part}": part for start in ("", "model.") for part in ("vision_model.", "multi_modal_projector.")},
)
