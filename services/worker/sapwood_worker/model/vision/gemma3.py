"""The vision part of Gemma 3: SigLIP's tower, whose patches are averaged to 256 tokens. A picture's tokens see all of it.

Source: Gemma 3, Google, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sapwood_worker.model.vision.encoder import PatchEncoder
from sapwood_worker.model.vision.llava import TOWERS
from sapwood_worker.model.vision.tower import HALF, Normaliser, Vision, VisionFamily, VisionFiles


class _Norm(nn.Module):
    """RMSNorm whose factor is 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class _Projector(nn.Module):
    def __init__(self, size: int, out: int, eps: float) -> None:
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(torch.empty(size, out))
        self.mm_soft_emb_norm = _Norm(size, eps)


class Gemma3Vision(Vision):
    """The vision part of Gemma 3."""

    whole = True

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        if files.vision.get("model_type", "siglip_vision_model") != "siglip_vision_model":
            raise ValueError("a tower other than SigLIP's is not supported")
        self.token = files.token("image_token_index", "image_token_id")
        self._normalise = Normaliser(files.processor, HALF, HALF)
        self.vision_tower = PatchEncoder(files.vision, -1, normed=True)
        self._side = int(int(files.config.get("mm_tokens_per_image", 256)) ** 0.5)
        if not self._side or self.vision_tower.patches % self._side:
            raise ValueError("mm_tokens_per_image does not fit the patches of a picture")
        eps = float(files.vision.get("layer_norm_eps", 1e-6))
        self.multi_modal_projector = _Projector(self.vision_tower.width, int(files.text.get("hidden_size", 2304)), eps)

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        side = self.vision_tower.side
        if tuple(shape) != (1, side, side):
            raise ValueError(f"a picture of {tuple(shape)}; it has one tile of {side} x {side} pixels")
        return self._side**2

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        tower, project = self.vision_tower, self.multi_modal_projector
        x = tower(self._normalise(pixels)).transpose(1, 2).unflatten(2, (tower.patches, tower.patches))
        pooled = functional.avg_pool2d(x, tower.patches // self._side).flatten(2).transpose(1, 2)
        tokens: Tensor = project.mm_soft_emb_norm(pooled) @ project.mm_input_projection_weight
        return tokens


GEMMA3 = VisionFamily("gemma3", ("Gemma3ForConditionalGeneration",), Gemma3Vision, TOWERS)
