"""Logits compared with transformers': prompts of tiny models, the steps that they are cut into, and how close is equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 2e-5
"""Largest error, as a share of the largest logit: float32 with another order of summation."""


def tokens_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def assert_same_logits(ours: Tensor, theirs: Tensor, tolerance: float = _TOLERANCE) -> None:
    """Asserts that logits are equal but for rounding, and large enough for that to mean something."""
    scale = theirs.abs().max().item()
    assert scale > 1.0
    worst = (ours - theirs).abs().max().item()
    assert worst <= tolerance * scale, f"largest difference {worst:.2e} of {scale:.2e}"


def assert_mixed_steps_equal(driver: Any, tiny: Any, tolerance: float = _TOLERANCE) -> None:
    """Asserts that logits of two prompts, in chunks over a cached prefix and decodes alone and with one, are
    transformers'."""
    prompts = {5: tokens_of(83), 2: tokens_of(47, seed=1)}
    for slot, tokens in prompts.items():
        driver.add(slot, tokens)
    parts: dict[int, list[Tensor]] = {slot: [] for slot in prompts}
    for chunks in ({5: 40, 2: 7}, {2: 38}, {5: 41}, {5: 1, 2: 1}, {2: 1, 5: 1}):
        logits = driver.runner.logits(driver.output(chunks))
        for slot, part in zip(chunks, logits.split(list(chunks.values())), strict=True):
            parts[slot].append(part)
    for slot, tokens in prompts.items():
        assert_same_logits(torch.cat(parts[slot]), tiny.logits(tokens), tolerance)
