"""A model with a layer for multi-token prediction to test with, and what that says by transformers' own layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_testing.models.tiny_models import Tiny

WIDTH, LAYERS = 48, 4


def with_head(tiny: Tiny, folder: Path, part: float | None = None) -> tuple[Path, dict[str, Tensor]]:
    """The model with a head after its layers, which has the last layer's weights; and what else the head has.

    Args:
        tiny: The model.
        folder: Where it is written.
        part: None: the head's other weights are random. Else the layers add only so much of what they did, and the head goes by
            the last token alone, so that it is often right where this is small.
    """
    shutil.copytree(tiny.path, folder)
    tensors = load_file(folder / "model.safetensors")
    if part is not None:
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] *= part
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    copied = {own + name.removeprefix(last): each.clone() for name, each in tensors.items() if name.startswith(last)}
    generator = torch.Generator().manual_seed(2)
    extra = {
        "enorm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
        "hnorm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
        "eh_proj.weight": torch.randn((WIDTH, 2 * WIDTH), generator=generator) / WIDTH**0.5,
        "shared_head.norm.weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
    }
    if part is not None:
        extra["enorm.weight"] = torch.ones(WIDTH)
        extra["eh_proj.weight"] = torch.cat((torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)), 1)
        extra["shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    shared = {
        f"{own}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{own}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    written = tensors | copied | shared | {own + name: each for name, each in extra.items()}
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, extra


class PlainHead:
    """The head by transformers' own layer, without a cache."""

    def __init__(self, oracle: Any, extra: dict[str, Tensor]) -> None:
        self.model, self.head, self.extra = oracle.model, oracle.lm_head, extra
        self.eps = oracle.config.rms_norm_eps

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.extra[f"{name}.weight"]

    @torch.inference_mode()
    def draft(self, known: list[int], count: int) -> list[int]:
        features = self.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        following, found = known[1:], []
        for _ in range(count):
            token = self.norm(self.model.embed_tokens(torch.tensor(following)), "enorm")
            both = torch.cat((token, self.norm(features, "hnorm")), -1)
            x = (both @ self.extra["eh_proj.weight"].T)[None]
            positions = torch.arange(len(following))[None]
            mask = torch.full((len(following),) * 2, float("-inf")).triu(1)[None, None]
            angles = self.model.rotary_emb(x, positions)
            x = self.model.layers[LAYERS - 1](
                x, attention_mask=mask, position_ids=positions, position_embeddings=angles
            )
            hidden = (x[0] if isinstance(x, tuple) else x)[0]
            found.append(int(self.head(self.norm(hidden[-1], "shared_head.norm")).argmax()))
            following = [*following, found[-1]]
            features = torch.cat((features, hidden[-1:]))
        return found
