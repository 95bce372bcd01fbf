"""Logits of our models equal transformers' to float32 rounding, however the tokens are cut into steps."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_testing.models.same_logits import assert_same_logits

K2_YARN = {
    "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": 32,
    "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
NAMES = [
    "llama",
    "llama-llama3-rope",
    "llama-linear-rope",
    "llama-yarn",
    "llama-biased-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-window",
    "gemma3",
    "gemma3-one-kv-head",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-moe-lite",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-moe-plain",
    "glm4-moe",
    "gpt-oss",
]


def tokens_of(length, seed=0):
    return random.Random(seed).choices(range(3, 97), k=length)


def test_every_tiny_model_is_tested(tiny_names):
    assert sorted(tiny_names) == sorted(NAMES)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_whole_prompt_equal_transformers(tiny_model, make_runner, make_driver, name, page_size):
    tiny = tiny_model(name)
    driver = make_driver(make_runner(tiny.path, page_size=page_size))
    tokens = tokens_of(83)
    driver.add(5, tokens)
    assert_same_logits(driver.runner.logits(driver.output({5: 83})), tiny.logits(tokens))


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("name", NAMES)
def test_logits_in_chunks_over_a_cached_prefix_equal_transformers(tiny_model, make_runner, make_driver, name, chunk):
    tiny = tiny_model(name)
    driver = make_driver(make_runner(tiny.path, page_size=4))
    tokens = tokens_of(61, seed=1)
    driver.add(2, tokens)
    parts = []
    while driver.cached[2] < len(tokens):
        size = min(chunk, len(tokens) - driver.cached[2])
        parts.append(driver.runner.logits(driver.output({2: size})))
    assert_same_logits(torch.cat(parts), tiny.logits(tokens))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_decodes_mixed_with_chunks_equal_transformers(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    driver = make_driver(make_runner(tiny.path, page_size=8))
    lengths = {0: 40, 3: 1, 7: 77, 1: 25, 9: 100, 4: 3}
    prompts = {slot: tokens_of(length, seed=slot) for slot, length in lengths.items()}
    for slot, tokens in prompts.items():
        driver.add(slot, tokens)
    parts = {slot: [] for slot in prompts}
    rng = random.Random(4)
    while any(driver.cached[slot] < len(tokens) for slot, tokens in prompts.items()):
        open_slots = [slot for slot, tokens in prompts.items() if driver.cached[slot] < len(tokens)]
        chosen = rng.sample(open_slots, rng.randint(1, len(open_slots)))
        chunks = {
            slot: min(rng.choice([1, 1, 1, 5, 34, 50]), len(prompts[slot]) - driver.cached[slot]) for slot in chosen
        }
        logits = driver.runner.logits(driver.output(chunks))
        for slot, part in zip(chunks, logits.split(list(chunks.values())), strict=True):
            parts[slot].append(part)
    for slot, tokens in prompts.items():
        assert_same_logits(torch.cat(parts[slot]), tiny.logits(tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "deepseek-v2"])
def test_prompt_longer_than_a_tile_equals_transformers(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    driver = make_driver(make_runner(tiny.path, num_pages=16 * 48))
    tokens = tokens_of(700, seed=2)
    driver.add(1, tokens[:4])
    driver.runner.execute(driver.output({1: 4}))
    driver.tokens[1] = tokens
    ours = driver.runner.logits(driver.output({1: 696}))
    assert_same_logits(ours, tiny.logits(tokens)[4:])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "deepseek-v3"])
def test_greedy_tokens_equal_transformers_generate(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    driver = make_driver(make_runner(tiny.path))
    prompts = {slot: tokens_of(10 + 7 * slot, seed=slot) for slot in range(6)}
    ours = driver.generate(prompts, 24)
    for slot, prompt in prompts.items():
        with torch.inference_mode():
            theirs = tiny.oracle.generate(
                torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None
            )
        assert ours[slot] == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("deepseek-v2", {"q_lora_rank": None, "topk_method": "greedy"}),
        ("deepseek-v3", {"rope_interleave": False, "norm_topk_prob": False, "rope_parameters": K2_YARN}),
        ("deepseek-v3", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 99}),
    ],
)
def test_logits_of_deepseeks_other_settings_equal_transformers(tiny_model, make_runner, make_driver, name, others):
    tiny = tiny_model(name, **others)
    driver = make_driver(make_runner(tiny.path))
    tokens = tokens_of(83)
    driver.add(5, tokens)
    assert_same_logits(driver.runner.logits(driver.output({5: 83})), tiny.logits(tokens))


def test_latents_expanded_for_some_heads_at_a_time_give_the_same(tiny_model, make_runner, make_driver, monkeypatch):
    monkeypatch.setattr("sapwood_worker.model.attention.torch_native._EXPANDED", 2 * 83 * (8 + 16 + 10) + 5)
    tiny = tiny_model("deepseek-v3")
    calls = []
    expand = LatentHeads.expand
    monkeypatch.setattr(LatentHeads, "expand", lambda *given: calls.append(given[2]) or expand(*given))
    driver = make_driver(make_runner(tiny.path))
    tokens = tokens_of(83)
    driver.add(5, tokens)
    assert_same_logits(driver.runner.logits(driver.output({5: 83})), tiny.logits(tokens))
    assert calls == 4 * [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_bfloat16_logits_are_near_float32(tiny_model, make_runner, make_driver):
    tiny = tiny_model("gemma3")
    driver = make_driver(make_runner(tiny.path, dtype="bfloat16"))
    tokens = tokens_of(30)
    driver.add(0, tokens)
    ours, theirs = driver.runner.logits(driver.output({0: 30})), tiny.logits(tokens)
    assert ours.dtype == torch.float32
    # 8 bits of mantissa through 7 layers.
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def renamed(path, copy):
    """A copy of a Helium whose files call it by a name that no family has."""
    shutil.copytree(path, copy)
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("HeliumForCausalLM", "KryptonForCausalLM"))
    return copy


def test_a_package_can_bring_a_family(plugin, tiny_model, make_runner, make_driver, tmp_path):
    tiny = tiny_model("another")
    path = renamed(tiny.path, tmp_path / "krypton")
    with pytest.raises(
        ConfigError,
        match=r"KryptonForCausalLM is not supported; \d+ are, such as \w+ForCausalLM, .*: docs/models.md lists them",
    ):
        make_runner(path)
    plugin(
        "sapwood.model_families",
        "krypton",
        """
        from sapwood_worker.model.families.family import ModelFamily
        from sapwood_worker.model.families.llama import LlamaDecoderLayer

        def from_hf(found):
            if found.values["hidden_act"] == "relu":
                raise ValueError("relu is nothing for a Krypton")
            return found.interleaved().llama()

        FAMILY = ModelFamily(
            name="krypton",
            architectures=("KryptonForCausalLM",),
            layer=LlamaDecoderLayer,
            defaults={"tie_word_embeddings": False, "rope_theta": 100_000.0},
            from_hf=from_hf,
            from_gguf=None,
        )
        """,
        "FAMILY",
    )
    driver = make_driver(make_runner(path))
    tokens = tokens_of(83)
    driver.add(5, tokens)
    assert_same_logits(driver.runner.logits(driver.output({5: 83})), tiny.logits(tokens))
    assert driver.runner.info.architecture == "krypton"
    config = tmp_path / "other" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(json.loads((path / "config.json").read_text()) | {"hidden_act": "relu"}))
    with pytest.raises(ConfigError, match=f"{config}: relu is nothing for a Krypton"):
        make_runner(config.parent)


def test_a_package_can_bring_a_layout_of_the_cache(plugin, tiny_model, make_runner, make_driver, tmp_path):
    """Here tokens outside heads, and layers with and without a window (of the whole context) in page tables of their own."""
    tiny = tiny_model("another")
    plugin(
        "sapwood.model_families",
        "krypton_apart",
        """
        from dataclasses import replace

        from sapwood_worker.model.families.family import ModelFamily
        from sapwood_worker.model.families.llama import LlamaDecoderLayer
        from sapwood_worker.records.kv_layout import KVComponent, KVLayout

        def layout(config, dtype, page_size):
            kept = KVComponent(tuple(range(0, config.num_layers, 2)), 2, config.num_kv_heads, config.head_dim, dtype)
            others = replace(kept, layers=tuple(range(1, config.num_layers, 2)), needed=config.max_position)
            return KVLayout((kept, others), page_size, order="NHD")

        FAMILY = ModelFamily(
            "krypton_apart", ("KryptonForCausalLM",), LlamaDecoderLayer, {"tie_word_embeddings": False, "rope_theta": 100_000.0},
            from_hf=lambda found: found.interleaved().llama(), from_gguf=None, kv_layout=layout,
        )
        """,
        "FAMILY",
    )
    driver = make_driver(make_runner(renamed(tiny.path, tmp_path / "krypton")))
    tokens = tokens_of(83)
    driver.add(5, tokens)
    assert_same_logits(driver.runner.logits(driver.output({5: 83})), tiny.logits(tokens))
    [window] = driver.runner.info.windows
    assert window.reach == driver.runner.info.context_length - 1
    pages = driver.runner._pool.pages[1]
    assert pages.shape[:3] == (window.num_pages + 1, 2, driver.runner.info.page_size)
    assert "NHD" in driver.runner.cache_identity()


@pytest.mark.parametrize("other", ["dim=2 * config.head_dim", "needed='state'"])
def test_a_layout_that_attention_does_not_take_is_refused_by_the_model_s_name(
    other, plugin, tiny_model, make_runner, tmp_path
):
    plugin(
        "sapwood.model_families",
        "krypton_uneven",
        f"""
        from dataclasses import replace

        from sapwood_worker.model.families.family import ModelFamily
        from sapwood_worker.model.families.llama import LlamaDecoderLayer
        from sapwood_worker.records.kv_layout import KVComponent, KVLayout

        def layout(config, dtype, page_size):
            kept = KVComponent((0,), 2, config.num_kv_heads, config.head_dim, dtype)
            others = replace(kept, layers=tuple(range(1, config.num_layers)), {other})
            return KVLayout((kept, others), page_size)

        FAMILY = ModelFamily(
            "krypton_uneven", ("KryptonForCausalLM",), LlamaDecoderLayer,
            {{"tie_word_embeddings": False, "rope_theta": 100_000.0}},
            from_hf=lambda found: found.interleaved().llama(), from_gguf=None, kv_layout=layout,
        )
        """,
        "FAMILY",
    )
    with pytest.raises(ConfigError, match="krypton_uneven: attention takes no heads of several shapes"):
        make_runner(renamed(tiny_model("another").path, tmp_path / "krypton"))
