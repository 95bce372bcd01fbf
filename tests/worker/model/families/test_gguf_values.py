"""What is said of metadata of GGUF files that no model can have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufTensor
from sapwood_worker.model.checkpoint.gguf_source import canonical, read_gguf_config, stored_name
from sapwood_worker.model.layers.rotary import LinearScaling, YarnScaling, yarn_magnitude

SIZES: dict[str, Any] = {
    "block_count": 4, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 8,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 8,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}
LATENT = {
    "attention.head_count_kv": 1, "attention.q_lora_rank": 0, "attention.kv_lora_rank": 32, "attention.key_length": 40,
    "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gemma2": SIZES,
    "gemma3": SIZES | {"attention.sliding_window": 512},
    "phi3": SIZES,
    "qwen2moe": SIZES | EXPERTS | {"expert_shared_feed_forward_length": 48},
    "gpt-oss": SIZES | EXPERTS | {"attention.sliding_window": 128},
    "glm4moe": SIZES | EXPERTS | {"expert_shared_count": 1},
    "deepseek2": SIZES | EXPERTS | LATENT | {"expert_shared_count": 1},
}


def read(architecture: str, changes: dict[str, Any]) -> Any:
    settings = MODELS[architecture] | changes
    metadata = {f"{architecture}.{key}": value for key, value in settings.items() if value is not None}
    tensors = {name: GgufTensor(name, (512, 64), 0, 0) for name in ("token_embd.weight", "blk.1.ffn_gate_inp.weight")}
    file: Any = SimpleNamespace(
        path=Path("some.gguf"), metadata={"general.architecture": architecture, **metadata}, tensors=tensors
    )
    return read_gguf_config(file)[1]


@pytest.mark.parametrize("architecture", MODELS)
def test_sizes_are_read(architecture: str) -> None:
    config = read(architecture, {})
    assert (config.num_layers, config.num_heads, config.hidden_size) == (4, 8, 64)


@pytest.mark.parametrize(
    "key",
    [
        *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length"),
        *("llama.attention.value_length", "llama.embedding_length", "llama.block_count", "llama.feed_forward_length"),
        *("llama.context_length", "llama.rope.dimension_count", "gemma2.attention.sliding_window"),
        *(
            "gemma3.attention.sliding_window",
            "gemma3.attention.sliding_window_pattern",
            "gpt-oss.attention.sliding_window",
        ),
        *("gpt-oss.expert_count", "gpt-oss.expert_used_count", "gpt-oss.expert_feed_forward_length"),
        *("qwen2moe.expert_shared_feed_forward_length", "deepseek2.rope.dimension_count"),
        *("deepseek2.attention.key_length", "deepseek2.attention.key_length_mla", "deepseek2.attention.value_length"),
        *("deepseek2.attention.value_length_mla", "deepseek2.attention.kv_lora_rank"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, [8, 8], "eight", 1.5, True])
def test_a_size_that_is_none_is_named(key: str, value: object) -> None:
    architecture, _, inside = key.partition(".")
    with pytest.raises(ConfigError, match=rf"some\.gguf: {key} is .*; it can be a whole number from 1 on"):
        read(architecture, {inside: value})


@pytest.mark.parametrize(
    "key",
    [
        *("phi3.attention.sliding_window", "deepseek2.attention.q_lora_rank", "deepseek2.expert_shared_count"),
        *("deepseek2.expert_group_count", "deepseek2.expert_group_used_count", "glm4moe.nextn_predict_layers"),
        "glm4moe.expert_shared_count",
    ],
)
def test_some_may_be_0_but_not_less(key: str) -> None:
    architecture, _, inside = key.partition(".")
    read(architecture, {inside: 0})
    with pytest.raises(ConfigError, match=rf"{key} is -1; it can be a whole number from 0 on"):
        read(architecture, {inside: -1})


def test_files_of_llamas_without_experts_may_say_that_there_are_none() -> None:
    assert read("llama", {"expert_count": 0}).sparse is None


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"attention.head_count": 65}, "llama.attention.key_length is 0"),
        ("glm4moe", {"nextn_predict_layers": 4}, "glm4moe.block_count without nextn_predict_layers is 0"),
        ("deepseek2", {"attention.key_length_mla": 8}, "a key's size without deepseek2.rope.dimension_count is 0"),
        (
            "qwen2moe",
            {"expert_used_count": 9},
            "qwen2moe.expert_count 8, qwen2moe.expert_used_count 9, .*: a token cannot go to 9 of 8 experts",
        ),
        ("glm4moe", {"expert_group_count": 8}, "glm4moe.expert_group_count 8, .*: groups of 1 experts are too small"),
        ("deepseek2", {"expert_group_count": 3}, "deepseek2.expert_group_count 3, .*cannot be chosen among 8 experts"),
    ],
)
def test_sizes_that_do_not_fit_together_are_named(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(architecture, changes)


def rope_of(**changes: Any) -> Any:
    config = read("llama", {key.replace("__", "."): value for key, value in changes.items()})
    [rope] = set(config.ropes)
    return rope.scaling


def test_rope_scaling_in_its_old_forms_and_without_a_type_is_linear() -> None:
    assert rope_of() is None
    for form in (
        {"rope__scale_linear": 4.0},
        {"rope__scaling__factor": 4.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ):
        assert rope_of(**form) == LinearScaling(4.0)
    assert rope_of(rope__scaling__type="none", rope__scaling__factor=4.0) is None
    assert rope_of(rope__scaling__type="linear") is None


def test_yarn_takes_its_betas_and_factors_of_attention_from_the_file() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 1024}
    usual = rope_of(**yarn)
    assert usual == YarnScaling(4.0, 1024, 32.0, 1.0, yarn_magnitude(4.0))
    own = rope_of(
        **yarn,
        rope__scaling__yarn_beta_fast=16.0,
        rope__scaling__yarn_beta_slow=2.0,
        rope__scaling__attn_factor=0.5,
        rope__scaling__yarn_attn_factor=3.0,
    )
    assert own == YarnScaling(4.0, 1024, 16.0, 2.0, 1.5 * yarn_magnitude(4.0))
    with pytest.raises(ConfigError, match=r"yarn_ext_factor 0.5 is not supported"):
        rope_of(**yarn, rope__scaling__yarn_ext_factor=0.5)
    with pytest.raises(ConfigError, match=r"llama\.rope\.scaling\.factor' is missing"):
        rope_of(rope__scaling__type="yarn")


@pytest.mark.parametrize("architecture", MODELS)
def test_a_key_that_nothing_reads_is_refused_by_its_name(architecture: str) -> None:
    with pytest.raises(ConfigError, match=rf"some\.gguf: {architecture}\.attention\.tilt \(0\.5\)"):
        read(architecture, {"attention.tilt": 0.5})
    read(architecture, {"attention.causal": True, "vocab_size": 512, "rope.scaling.finetuned": True})
    with pytest.raises(ConfigError, match="clamp_kqv"):
        read(architecture, {"attention.clamp_kqv": 8.0})


@pytest.mark.parametrize("value", ["many", [1, 2], None, {}, 1e400])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base", "attention.head_count"])
def test_a_value_of_another_kind_is_refused_by_its_key(key: str, value: Any) -> None:
    if value is None or (value == 1e400 and key != "attention.head_count"):
        return
    with pytest.raises(ConfigError, match=r"some\.gguf: "):
        read("llama", {key: value})


def test_a_missing_tensor_is_called_as_the_file_would_call_it() -> None:
    names = {"ffn_norm": "post_attention_layernorm"}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.layers.3.self_attn.k_proj.bias": "blk.3.attn_k.bias",
        "model.layers.3.post_attention_layernorm.weight": "blk.3.ffn_norm.weight",
        "model.layers.3.mlp.experts.7.up_proj.weight": "blk.3.ffn_up_exps.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias": "blk.3.exp_probs_b.bias",
    }.items():
        assert stored_name(ours, names) == theirs
    assert canonical("blk.2.ffn_down.5.weight", names) == "model.layers.2.mlp.experts.5.down_proj.weight"
