"""What a configuration says and nothing reads is refused by its name; what is published loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sapwood_common.errors import ConfigError
from sapwood_worker.model.checkpoint.hf_config import read_hf_config, read_hf_quantization
from sapwood_worker.model.families.registry import families

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "num_key_value_heads": 4,
}
"""Sizes of a small model, for settings that published files have."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "unsloth_fixed": True,
    },
    "vicuna": {
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": "vicuna-7b-v1.5",
        "max_sequence_length": 2048,
        "temperature": 0.9,
        "top_p": 0.6,
        "pad_token_id": 0,
        "use_cache": True,
        "rope_scaling": None,
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "use_mrope": False,
        "hidden_act": "silu",
    },
    "Qwen3-Coder": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 62,
        "mlp_only_layers": [],
        "moe_intermediate_size": 2560,
        "norm_topk_prob": True,
        "num_experts": 160,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "qkv_bias": False,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    },
    "gemma-2": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "rope_scaling": None,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    },
    "c4ai-command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "cache_implementation": "hybrid",
        "head_dim": 128,
        "layer_norm_eps": 1e-05,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "c4ai-command-r": {
        "architectures": ["CohereForCausalLM"],
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "model_max_length": 131072,
        "pretraining_tp": 1,
        "use_qk_norm": False,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 4,
        "head_dim": 128,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "router_jitter_noise": 0.0,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-05,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
        "use_bias": True,
    },
    "SmolLM3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["full_attention"] * 4,
        "pretraining_tp": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "attention_bias": False,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "ERNIE-4.5-21B": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "compression_ratio": 1.0,
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "use_bias": False,
        "use_rmsnorm": True,
        "enable_delay_scale_loss": True,
    },
}


def write(folder: Path, settings: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_loads(name: str, tmp_path: Path) -> None:
    read_hf_config(write(tmp_path, SIZES | PUBLISHED[name]))


def configurations() -> dict[str, str]:
    """The type of a model in transformers, for each architecture that is served."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    served = {name for family in families() for name in family.architectures}
    foreign = {"exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe", "gemma3", "llama4"}
    foreign |= {"qwen3_5", "qwen3_5_moe"}  # wrappers
    return {
        kind: name for kind, name in NAMES.items() if isinstance(name, str) and name in served and kind not in foreign
    }


NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention"]},
}
"""What transformers' own defaults lack."""


@pytest.mark.parametrize("kind", configurations())
def test_all_that_transformers_writes_of_a_served_model_is_known(kind: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
    made.architectures = [configurations()[kind]]
    for settings in (made.to_dict(), json.loads(made.to_json_string(use_diff=True))):
        read_hf_config(write(tmp_path, settings))


@pytest.mark.parametrize("kind", configurations())
def test_a_setting_that_nothing_reads_is_refused_by_name_for_every_family(kind: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind](**NEEDED.get(kind, {})).to_dict() | {"architectures": [configurations()[kind]]}
    for value in (2.5, 1, True, "on", [0], {"a": 1}):
        with pytest.raises(ConfigError, match=r"config\.json: attention_tilt \(.*nothing here reads"):
            read_hf_config(write(tmp_path, made | {"attention_tilt": value}))
    for value in (None, False, "", [], {}):
        read_hf_config(write(tmp_path, made | {"attention_tilt": value}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"num_experts": 8}, "num_experts"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        ({"layer_types": ["sliding_attention"] * 16}, "layer_types"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"rope_scaling": {"factor": 4.0}}, r"rope_scaling\.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 3}}, r"rope_scaling\.beta_fast"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            r"rope_parameters\.llama_4_scaling_beta",
        ),
    ],
)
def test_what_changes_numbers_and_llamas_do_not_have_is_refused(changes, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {named} "):
        read_hf_config(write(tmp_path, LLAMA | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": [1, 2]}, r"rope_scaling is \[1, 2\]"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": {}}}, "rope_scaling"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10000000; it can be 4096 at most"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000; it can be"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"hidden_act": {"a": 1}}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"rms_norm_eps": []}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps|could not convert"),
        ({"rope_theta": {}}, "rope_theta"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": [7]}, r"architectures is \[7\]"),
        ({"text_config": 3}, "text_config is 3"),
    ],
)
def test_a_malformed_setting_is_refused_by_name(changes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*({message})"):
        read_hf_config(write(tmp_path, LLAMA | changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "nested too deeply|cannot be read"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ("\xff", "JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"config\.json: .*({message})"):
        read_hf_config(tmp_path)


WRAPPED = {
    "Mistral3ForConditionalGeneration": (
        "mistral",
        {"model_type": "mistral", "is_composition": True, "head_dim": 128, **SIZES},
    ),
    "LlavaForConditionalGeneration": (
        "llama",
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32064, "rms_norm_eps": 1e-05},
    ),
    "KimiK25ForConditionalGeneration": (
        "deepseek_v3",
        {
            "model_type": "kimi_k2",
            "architectures": ["DeepseekV3ForCausalLM"],
            **SIZES,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "kv_lora_rank": 512,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2",
        {
            "model_type": "qwen2_5_vl_text",
            **SIZES,
            "max_window_layers": 28,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3",
        {
            "model_type": "qwen3_vl_text",
            **SIZES,
            "head_dim": 128,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
    ),
    "Gemma3ForConditionalGeneration": ("gemma3", {"model_type": "gemma3_text", "sliding_window": 512}),
    "AyaVisionForConditionalGeneration": ("cohere2", {"model_type": "cohere2", **SIZES}),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_language_part_of_a_wrapped_model_is_read(name: str, tmp_path: Path) -> None:
    family, text = WRAPPED[name]
    outer = {
        "architectures": [name],
        "image_token_index": 10,
        "projector_hidden_act": "gelu",
        "vision_config": {"hidden_size": 7},
        "text_config": text,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    }
    found, config = read_hf_config(write(tmp_path, outer))
    assert (found.name, config.architecture) == (family, family)
    assert config.vocab_size == text.get("vocab_size", 262208)
    with pytest.raises(ConfigError, match=r"config\.json: attention_tilt "):
        read_hf_config(write(tmp_path, outer | {"text_config": text | {"attention_tilt": 3}}))


def test_the_first_files_of_qwen2_vl_have_both_parts_settings_in_one(tmp_path: Path) -> None:
    flat = SIZES | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 80,
        "vision_config": {"depth": 32},
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "image_token_id": 5,
        "video_token_id": 6,
    }
    family, config = read_hf_config(write(tmp_path, flat))
    assert (family.name, config.qkv_bias, config.windows[0]) == ("qwen2", True, None)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (
            {"architectures": ["MllamaForConditionalGeneration"], "text_config": {"model_type": "mllama_text"}},
            "mllama_text, is not",
        ),
        (
            {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {"model_type": "gemma"}},
            "see those after them",
        ),
        ({"architectures": ["T5ForConditionalGeneration"]}, "no settings of its own"),
    ],
)
def test_a_wrapped_model_whose_language_part_is_not_served_is_refused(outer, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_config(write(tmp_path, outer))


QUANTISED: dict[str, dict[str, Any]] = {
    "gptq": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "desc_act": True,
        "group_size": 128,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:5.0"]},
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
        "true_sequential": True,
    },
    "awq": {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "mxfp4": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "bitsandbytes": {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    },
    "compressed-tensors": {
        "config_groups": {
            "group_0": {
                "input_activations": {
                    "dynamic": True,
                    "num_bits": 8,
                    "strategy": "token",
                    "symmetric": True,
                    "type": "float",
                },
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": None,
                    "num_bits": 8,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "channel",
                    "symmetric": True,
                    "type": "float",
                },
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": 1.2,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12",
    },
}


@pytest.mark.parametrize("name", QUANTISED)
def test_settings_of_quantised_weights_are_known_and_others_refused(name: str, tmp_path: Path) -> None:
    settings = QUANTISED[name]
    assert read_hf_quantization(write(tmp_path, LLAMA | {"quantization_config": settings})) == settings
    with pytest.raises(ConfigError, match=r"quantization_config: turned \("):
        read_hf_quantization(write(tmp_path, LLAMA | {"quantization_config": settings | {"turned": 1}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"transform_config": {"config_groups": {"R3": {"type": "hadamard", "apply": [{"location": "q_attn"}]}}}},
            "R3.apply.location",
        ),
        ({"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}}, "R4.apply.location"),
        ({"transform_config": {"what": 1}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is 'sparse-24-bitmask'"),
        ({"config_groups": {"group_0": {"targets": ["re:("], "weights": {"num_bits": 8}}}}, "group_0.targets"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": "8"}}}}, "num_bits is '8'"),
        ({"config_groups": {"group_0": {"rotated": True}}}, r"group_0\.rotated"),
        ({"config_groups": [1]}, "config_groups is"),
        ({"config_groups": {"group_0": 3}}, "group_0 is 3"),
    ],
)
def test_what_compressed_tensors_may_say_and_nothing_computes_is_refused(changes, message: str, tmp_path: Path) -> None:
    settings = QUANTISED["compressed-tensors"] | changes
    with pytest.raises(ConfigError, match=rf"quantization_config: .*{message}"):
        read_hf_quantization(write(tmp_path, LLAMA | {"quantization_config": settings}))


def test_rotations_that_are_in_the_weights_already_change_nothing(tmp_path: Path) -> None:
    turned = {"config_groups": {"R1": {"apply": [{"location": "weight_output"}, {"location": "weight_input"}]}}}
    settings = QUANTISED["compressed-tensors"] | {"transform_config": turned}
    assert read_hf_quantization(write(tmp_path, LLAMA | {"quantization_config": settings})) == settings


@pytest.mark.parametrize(
    ("file", "settings", "method"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "sym": True},
            "gptq",
        ),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
    ],
)
def test_settings_of_quantised_weights_may_be_in_a_file_of_their_own(
    file, settings, method: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    assert read_hf_quantization(write(tmp_path, LLAMA)) == {"quant_method": method, **settings}
