"""A model whose linear layers compute in float8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.steps import Part, step_for

PROMPT = [3 + i * 7 % 90 for i in range(40)]


def logits(runner) -> torch.Tensor:
    request = Part(0, PROMPT, 0, True, SamplingParams())
    return runner.logits(step_for(runner.info, 0, np.arange(8, dtype=np.int32).reshape(1, 8), [request]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_logits_stay_near_the_whole_model_s(name: str, tiny_model, make_runner):
    path = tiny_model(name).path
    whole = make_runner(path)
    expected = logits(whole)
    identities = {whole.cache_identity()}
    for quantization in ("fp8", "fp8_block", "fp8_tensor"):
        runner = make_runner(path, quantization=quantization)
        error = float((logits(runner) - expected).norm() / expected.norm())
        assert 0.001 < error < 0.4, quantization  # random weights make much of little differences
        identities.add(runner.cache_identity())
    assert len(identities) == 4


def test_one_token_a_step_gives_what_a_whole_prompt_gives(tiny_model, make_runner, make_driver):
    runner = make_runner(tiny_model("llama").path, quantization="fp8", kv_cache_dtype="fp8_e4m3")
    greedy = SamplingParams(temperature=0.0)
    tokens = make_driver(runner).generate({0: PROMPT}, 12, greedy)[0]
    again = [make_driver(runner).generate({1: PROMPT + tokens[:n]}, 1, greedy)[1][0] for n in (3, 7, 11)]
    # Sums in another order may round a key, and so a near tie, another way.
    assert sum(token == tokens[n] for token, n in zip(again, (3, 7, 11), strict=True)) >= 2
