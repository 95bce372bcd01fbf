"""The cache of latent attention: what a token takes, and one vector in place of keys and values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.families.family import attention_layout
from sapwood_worker.model.families.sparse.deepseek import DEEPSEEK_V3
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.pools.device_pool import DevicePool

# DeepSeek-V3.
LAYERS, HEADS = 61, 128
V3 = LatentConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
CPU = torch.device("cpu")
PROMPT = [3 + i * 7 % 90 for i in range(60)]


def bytes_of_token(pool: DevicePool) -> float:
    return pool.num_bytes / (pool.num_pages * pool.page_size)


def test_deepseek_v3s_pool_is_93_percent_smaller_than_its_heads_keys_and_values(tiny_model):
    _, tiny = read_hf_config(tiny_model("deepseek-v3").path)
    config = replace(tiny, num_layers=LAYERS, windows=(None,) * LAYERS, num_heads=HEADS, latent=V3)
    latent = DevicePool(DEEPSEEK_V3.kv_layout(config, "bfloat16", 16), 2, CPU)
    heads = replace(config, latent=None, num_kv_heads=HEADS, head_dim=128)
    whole = DevicePool(attention_layout(heads, "bfloat16", 16), 2, CPU)
    assert bytes_of_token(latent) == LAYERS * (512 + 64) * 2 == 70_272
    assert bytes_of_token(whole) == LAYERS * HEADS * 2 * 128 * 2 == 3_997_696
    assert 1 - latent.num_bytes / whole.num_bytes > 0.98


def test_a_pool_of_latents_has_one_vector_a_token_for_keys_and_values(tiny_model, make_runner):
    runner = make_runner(tiny_model("deepseek-v2").path, page_size=4)
    pool = runner._pool
    assert pool.pages[0].shape == (pool.num_pages, 1, 1, 4, 24 + 16)
    assert pool.key_pages(0).data_ptr() == pool.value_pages(0).data_ptr()
    assert "1x1x40" in runner.cache_identity()


def step(runner, tokens, start):
    request = Part(0, tokens, start, True, SamplingParams(temperature=0.0))
    return step_for(runner.info, 0, np.arange(8, dtype=np.int32).reshape(1, 8), [request])


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_a_float8_pool_of_latents_is_near_a_whole_one(tiny_model, make_runner, name):
    model = tiny_model(name, first_k_dense_replace=64).path  # without experts: rounding may change who is chosen
    whole, small = (make_runner(model, **options) for options in ({}, {"kv_cache_dtype": "fp8_e4m3"}))
    assert small._pool.num_bytes * 4 == whole._pool.num_bytes
    assert small.cache_identity() != whole.cache_identity()
    expected, at_once = (runner.logits(step(runner, PROMPT, 0)) for runner in (whole, small))
    assert 0 < float((at_once - expected).norm() / expected.norm()) < 0.3
    # Absorbed and expanded: a token alone reads what the prompt has left.
    chunks = [small.logits(step(small, PROMPT[at:to], at)) for at, to in ((0, 50), (50, 59), (59, 60))]
    torch.testing.assert_close(torch.cat(chunks), at_once, rtol=0.02, atol=0.02)
