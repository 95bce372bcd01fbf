"""What the published files of mixtures of experts say, and how it is read."""

from __future__ import annotations

import json

import pytest

from sapwood_common.errors import ConfigError
from sapwood_kernels.experts.reference import ClampedGate
from sapwood_kernels.experts.routing import Routing
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.layers.sparse.sparse_mlp import SharedExpert

YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    "truncate": False,
}  # fmt: skip
PUBLISHED = {
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768,
        "use_sliding_window": False, "vocab_size": 151936, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "partial_rotary_factor": 0.5, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 160, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        "use_qk_norm": True, "vocab_size": 151552,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_scaling": YARN, "rope_theta": 150000, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "K-EXAONE-236B-A23B": {
        "architectures": ["ExaoneMoEForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 6144, "intermediate_size": 18432, "max_position_embeddings": 262144, "moe_intermediate_size": 2048,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12, "n_group": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_shared_experts": 1, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "vocab_size": 153600,
    },
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read_one(name, **changes):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
        return read_hf_config(tmp_path)[1]

    return read_one


def test_mixtral(read):
    config = read("Mixtral-8x7B-v0.1")
    assert config.sparse.routing == Routing(8, 2, renormalise=True)
    assert (config.sparse.intermediate_size, config.sparse.block) == (14336, "block_sparse_moe")
    assert set(config.windows) == {None}
    assert config.head_dim == 128


def test_qwen2_moe(read):
    config = read("Qwen1.5-MoE-A2.7B")
    assert config.sparse.routing == Routing(60, 4)
    assert config.sparse.shared == SharedExpert("shared_expert", 5632, gated=True)
    assert config.qkv_bias
    assert not config.output_bias
    assert set(config.windows) == {None}


def test_qwen3_moe(read):
    config = read("Qwen3-30B-A3B")
    assert config.sparse.routing == Routing(128, 8, renormalise=True)
    assert config.sparse.intermediate_size == 768
    assert not config.sparse.dense_layers
    assert config.qk_norm
    assert set(config.windows) == {None}


def test_shared_experts_of_no_width_are_none_to_a_family_that_reads_no_such_setting(read):
    assert read("Qwen3-30B-A3B", shared_expert_intermediate_size=0).sparse.shared is None
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size is 0"):
        read("Qwen1.5-MoE-A2.7B", shared_expert_intermediate_size=0)


def test_glm(read):
    config = read("GLM-4.5")
    routing = config.sparse.routing
    assert (routing.experts, routing.chosen, routing.scores, routing.scale) == (160, 8, "sigmoid", 2.5)
    assert routing.renormalise
    assert config.sparse.dense_layers == {0, 1, 2}
    assert config.sparse.shared == SharedExpert("shared_experts", 1536)
    assert config.sparse.correction
    assert config.qkv_bias
    assert not config.output_bias
    assert config.draft_layers == 1
    assert {rope.rotated for rope in config.ropes} == {64}


def test_gpt_oss(read):
    config = read("gpt-oss-20b")
    assert config.sparse.routing == Routing(32, 4, renormalise=True)
    assert config.sparse.joined == ClampedGate(1.702, 7.0)
    assert config.attention_sinks
    assert config.qkv_bias
    assert config.output_bias
    assert config.windows == (128, None) * 12
    assert config.max_position == 131072
    [rope] = set(config.ropes)
    assert rope.scaling.magnitude == pytest.approx(1.3466, abs=1e-4)


def test_k_exaone(read):
    config = read("K-EXAONE-236B-A23B")
    routing = config.sparse.routing
    assert (routing.experts, routing.chosen, routing.scores, routing.scale) == (128, 8, "sigmoid", 2.5)
    assert config.sparse.dense_layers == {0}
    assert config.sparse.shared == SharedExpert("shared_experts", 2048)
    assert config.windows == (128, 128, 128, None) * 12
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 12


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "Mixtral-8x7B-v0.1",
            {"num_experts_per_tok": 9},
            "num_local_experts 8, num_experts_per_tok 9: a token cannot go to 9 of 8 experts",
        ),
        ("Qwen1.5-MoE-A2.7B", {"num_experts_per_tok": 61}, "num_experts 60, num_experts_per_tok 61: "),
        ("Qwen3-30B-A3B", {"num_local_experts": 4}, "num_local_experts 4, num_experts_per_tok 8: "),
        (
            "GLM-4.5",
            {"n_group": 3},
            "n_routed_experts 160, num_experts_per_tok 8, n_group 3, topk_group 1: 1 of 3 groups cannot be chosen",
        ),
        ("GLM-4.5", {"n_group": 160, "topk_group": 8}, "n_group 160, topk_group 8: groups of 1 experts are too small"),
        ("gpt-oss-20b", {"num_experts_per_tok": 33}, "num_local_experts 32, num_experts_per_tok 33: "),
        ("K-EXAONE-236B-A23B", {"topk_group": 2}, "num_experts 128, num_experts_per_tok 8, n_group 1, topk_group 2: "),
    ],
)
def test_numbers_of_experts_that_do_not_fit_together_are_named(read, name, changes, message):
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        read(name, **changes)
