"""Random adapters of tiny models, saved by PEFT, and PEFT's merged models as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sapwood_testing.models.tiny_models import Tiny


def make_adapter(
    tiny: Tiny,
    folder: Path,
    *,
    rank: int = 8,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 0,
    **settings: Any,
) -> Tiny:
    """An adapter whose effect is large, saved in a folder; returns the folder with the model that PEFT merges it into.

    Args:
        tiny: The model.
        folder: Where it is saved.
        rank: Its rank.
        targets: The modules that it is for.
        seed: Of its numbers.
        **settings: Others of ``peft.LoraConfig``.
    """
    import peft

    config = peft.LoraConfig(
        r=rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        **{"lora_alpha": 2 * rank, **settings},
    )
    model = peft.get_peft_model(copy.deepcopy(tiny.oracle), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                size = weight.shape[1] if ".lora_A." in name else 4 * weight.shape[1]
                weight.copy_(torch.randn(weight.shape, generator=generator) / size**0.5)
    model.save_pretrained(str(folder))
    return Tiny(folder, model.merge_and_unload().eval())
