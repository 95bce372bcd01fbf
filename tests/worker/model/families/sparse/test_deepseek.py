"""What the published files of DeepSeek V3, V2-Lite and Kimi K2 say, and what is refused of such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.layers.rotary import YarnScaling
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert, SparseConfig

_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "hidden_act": "silu",
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
K2 = V3 | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "topk_group": 1,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "vocab_size": 163840,
    "routed_scaling_factor": 2.827,
}  # fmt: skip
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "q_lora_rank": None,
    "num_key_value_heads": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_group": 1, "topk_method": "greedy", "tie_word_embeddings": False, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip


def read(folder: Path, settings: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(settings))
    return read_hf_config(folder)[1]


def test_deepseek_v3(tmp_path):
    config = read(tmp_path, V3)
    assert config.latent == LatentConfig(512, 128, 64, 128, q_lora_rank=1536)
    assert config.sparse == SparseConfig(
        Routing(256, 8, "sigmoid", True, 2.5, groups=8, chosen_groups=4, group_score="two_best"),
        2048,
        dense_layers=frozenset({0, 1, 2}),
        shared=SharedExpert("shared_experts", 2048),
        correction="gate.e_score_correction_bias",
    )
    assert config.draft_layers == 1
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3688879**2)
    [rope] = set(config.ropes)
    assert rope is not None
    assert rope.scaling == YarnScaling(40.0, 4096, 32.0, 1.0, 1.0)
    assert config.max_position == 163840


def test_kimi_k2_is_v3_with_one_group(tmp_path):
    config = read(tmp_path, K2)
    assert config.architecture == "deepseek_v3"
    assert config.sparse is not None
    assert config.sparse.routing == Routing(384, 8, "sigmoid", True, 2.827, group_score="two_best")
    assert config.sparse.dense_layers == {0}
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3465736**2)
    assert (config.draft_layers, config.max_position) == (0, 131072)


def test_deepseek_v2_lite_makes_queries_of_the_layers_input(tmp_path):
    config = read(tmp_path, V2_LITE)
    assert config.latent == LatentConfig(512, 128, 64, 128, q_lora_rank=None)
    assert config.sparse is not None
    assert config.sparse.routing == Routing(64, 6)
    assert config.sparse.shared == SharedExpert("shared_experts", 2816)
    assert not config.sparse.correction


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (V3, {"attention_bias": True}, "attention_bias is not supported with latent attention"),
        (V3, {"scoring_func": "softmax"}, r"scoring_func 'softmax' is not supported \('sigmoid' is\)"),
        (V3, {"topk_method": "greedy"}, r"topk_method 'greedy' is not supported \('noaux_tc' is\)"),
        (V3, {"n_group": 7}, "4 of 7 groups cannot be chosen among 256 experts"),
        (V3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary embedding type 'dynamic' is not supported"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        (V2_LITE, {"num_experts_per_tok": None}, "'num_experts_per_tok' is missing"),
        (V2_LITE, {"n_group": 0}, "n_group is 0; it can be a whole number from 1 on"),
        (V2_LITE, {"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        (V3, {"num_experts_per_tok": "all"}, "num_experts_per_tok is 'all'"),
        (V3, {"hidden_size": -1}, "hidden_size is -1"),
        (V3, {"kv_lora_rank": 1.5}, "kv_lora_rank is 1.5"),
        (V3, {"n_shared_experts": -1}, "n_shared_experts is -1; it can be a whole number from 0 on"),
        (V3, {"v_head_dim": 200}, "v_head_dim 200 above a key's 192 numbers is not supported"),
    ],
)
def test_what_is_not_there_is_refused_by_name(tmp_path, settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, settings | changes)


def test_files_of_models_without_experts_may_say_that_there_are_none(tmp_path):
    kept = {"model_type", "hidden_act", "hidden_size", "intermediate_size", "rms_norm_eps", "rope_theta", "vocab_size"}
    kept |= {"max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"}
    llama = {key: V3[key] for key in kept}
    config = read(tmp_path, llama | {"architectures": ["LlamaForCausalLM"], "num_experts": 0, "num_experts_per_tok": 0})
    assert config.sparse is None
