"""Prompts of latent layers whose values are as narrow as they are, as on a GPU where cuDNN takes them so: the same answers."""

from __future__ import annotations

import torch

from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_worker.model.attention import latent_prefill
from sapwood_worker.model.attention.backend import AttentionLayer

HEADS, NOPE, ENDS, VALUE, RANK = 2, 16, 8, 12, 32


def test_a_prompt_computed_whole_lends_its_keys_to_prompts_with_its_beginning(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator) / RANK**0.5
    layer = AttentionLayer(0, (NOPE + ENDS) ** -0.5, latent=LatentHeads(up, NOPE))
    # Two requests: one of 40 tokens that are all computed, one that sees its first 24 and 9 of its own.
    prompts = [latent_prefill._Prompt(slice(0, 40), 40, 0), latent_prefill._Prompt(slice(40, 49), 33, 24)]
    stored = [torch.randn(tokens, RANK + ENDS, generator=generator) for tokens in (40, 9)]
    query = torch.randn(49, HEADS, NOPE + ENDS, generator=generator)

    def attended(narrow: bool) -> torch.Tensor:
        asked = []
        monkeypatch.setattr(latent_prefill, "LEAST_PLANNED", 32)
        monkeypatch.setattr(latent_prefill, "prefers_cudnn", lambda device: True)
        monkeypatch.setattr(latent_prefill, "takes_narrow", lambda *kind: asked.append(kind) or narrow)
        found = latent_prefill._attend(layer, query, prompts, stored, torch.empty(49, HEADS, VALUE))
        assert len(asked) == 1
        return found

    torch.testing.assert_close(attended(True), attended(False))
