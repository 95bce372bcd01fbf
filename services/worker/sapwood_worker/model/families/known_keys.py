"""Which settings of a model's files are known. The rule: a setting in a file that no code reads is refused by its name.

A setting of ``config.json`` is *read* if the family looked it up (``values.py`` notes it), *harmless* if it is named here or by
the family (``ModelFamily.unread``), else refused. Files of other kinds have a list of what is read, too.
``docs/checkpoint-keys.md`` is written from these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Same:
    """A setting is harmless if it says what another one says, which is read.

    Attributes:
        key: The other one.
        default: The meaning of a missing setting.
    """

    key: str
    default: Any = None


Allowed = tuple[Any, ...] | Same
"""The values with which a setting is harmless, or each element of a list; none: any."""


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The known settings of one kind of file. ``*`` in a name stands for any characters.

    Attributes:
        file: The file's name, for people.
        read: The settings that are read; empty: the reader of the settings notes them.
        harmless: Settings that change no number of ours, by the reason; names with spaces between.
        limited: Settings that are harmless with some values only.
    """

    file: str
    read: tuple[str, ...] = ()
    harmless: Mapping[str, str] = field(default_factory=dict)
    limited: Mapping[str, Allowed] = field(default_factory=dict)

    def refused(
        self,
        settings: Mapping[str, Any],
        limited: Mapping[str, Allowed] | None = None,
        everything: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The settings that are neither read nor harmless; null, false and what is empty say nothing.

        Args:
            settings: Those that are asked about.
            limited: Further settings that are harmless only with some values.
            everything: All settings of the file; None: those that are asked about.
        """
        known, values = {**self.limited, **(limited or {})}, settings if everything is None else everything
        harmless = (*self.read, *(name for names in self.harmless.values() for name in names.split()))
        return {
            name: value
            for name, value in settings.items()
            if not says_nothing(value)
            and not any(fnmatchcase(name, each) for each in harmless)
            and not (name in known and _agrees(value, known[name], values))
        }


def says_nothing(value: Any) -> bool:
    """Whether a setting with this value is as if it were not there: null, false, or empty."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def refusal(where: str, refused: Mapping[str, Any]) -> str:
    """The error text for refused settings.

    Args:
        where: The file, perhaps with the name of the object in it.
        refused: The settings, at least one.
    """
    shown = ", ".join(f"{name} ({short(value)})" for name, value in sorted(refused.items())[:4])
    rest = f" and {len(refused) - 4} more" if len(refused) > 4 else ""
    are = "is a setting" if len(refused) == 1 else "are settings"
    return (
        f"{where}: {shown}{rest} {are} that nothing here reads, and that may change what the model computes; "
        "if that is not so, remove it from the file (docs/checkpoint-keys.md lists what is known)"
    )


def short(value: Any) -> str:
    """A value for an error message, cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _agrees(value: Any, allowed: Allowed, settings: Mapping[str, Any]) -> bool:
    if isinstance(allowed, Same):
        other = settings.get(allowed.key)
        return bool(value == (allowed.default if other is None else other))
    values = value if isinstance(value, list) else [value]
    return not allowed or all(each in allowed for each in values)


CONFIG = KnownKeys(
    "config.json",
    harmless={
        "names, versions and what other programs keep there": """
            _* architectures model_type auto_map transformers_version torch_dtype dtype custom_pipelines
            finetuning_task task_specific_params tokenizer_class processor_class name_or_path license license_name
            unsloth_* transformers.js_config sentence_transformers framework creator language description
            is_composition sub_configs base_model base_model_name_or_path trust_remote_code vllm_* sglang_*
            use_flash_attn use_flash_attention use_flash_attention_2 attn_implementation flash_attn_* use_sdpa
        """,
        "of labels, which only models that classify read": """
            id2label label2id num_labels problem_type
        """,
        "of training": """
            *_dropout *_dropout_prob dropout *_pdrop dropout_rate layerdrop initializer_* *_initializer_range init_std
            init_method_std summary_* router_aux_loss_coef router_z_loss_coef aux_loss_alpha aux_loss_coef
            moe_aux_loss_* router_jitter_noise jitter_eps input_jitter_noise output_router_logits seq_aux
            pretraining_tp gradient_checkpointing* enable_delay_scale_loss multi_token_pred_lambda ignore_index
            keys_to_ignore_at_inference for_llm_compressor tie_encoder_decoder moe_dropout_prob fuse_cross_entropy
            loss_type problem_types label_smoothing
        """,
        "of how other engines run the model": """
            use_cache cache_implementation return_dict output_attentions output_hidden_states torchscript
            chunk_size_feed_forward use_bfloat16 tf_legacy_loss ep_size use_parallel_embedding fuse_* use_fused_*
            use_recompute* tensor_parallel_* sequence_parallel expert_parallel* attention_softmax_in_fp32
            scale_attention_softmax_in_fp32 use_embedding_sharing max_model_len use_cache_kernel moe_capacity
        """,
        "token ids, which are read where ends of a turn are": """
            bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
            decoder_start_token_id forced_bos_token_id forced_eos_token_id bos_token eos_token pad_token
            stop_token_ids
        """,
        "defaults of sampling, which generation_config.json gives": """
            temperature top_p top_k typical_p do_sample num_beams num_beam_groups diversity_penalty repetition_penalty
            length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size max_length min_length max_new_tokens
            early_stopping num_return_sequences return_dict_in_generate output_scores exponential_decay_length_penalty
            remove_invalid_values begin_suppress_tokens suppress_tokens bad_words_ids
        """,
        "lengths of other programs; max_position_embeddings is read": """
            max_sequence_length max_seq_len max_seq_length seq_length seq_len model_max_length n_positions n_ctx
            initial_context_length
        """,
        "read elsewhere": """
            text_config quantization_config compression_config matryoshka_dimensions is_matryoshka
            sbert_ce_default_activation_function original_max_position_embeddings num_nextn_predict_layers
        """,
        "of layers that only draft tokens": """
            use_mtp num_mtp_modules num_mtp_layers mtp_* num_nextn_layers nextn_*
        """,
        "of pictures and sound, which change nothing of text": """
            vision_* image_* video_* audio_* mm_* boi_* eoi_* boa_* eoa_* visual vision_config vit_* projector_*
            multimodal_projector_* spatial_merge_size rope_scaling.mrope_section rope_scaling.mrope_interleaved
            rope_parameters.mrope_section rope_parameters.mrope_interleaved use_mrope is_multimodal image_token_id
            video_token_id
        """,
        "the size of a query's and a key's head together": """
            qk_head_dim
        """,
        "of windows, which sliding_window gives": """
            max_window_layers
        """,
        "of scaling that the kind of rotary embedding does not have": """
            rope_scaling.original_max_position_embeddings rope_parameters.original_max_position_embeddings
            rope_scaling.finetuned rope_parameters.*.original_max_position_embeddings
        """,
    },
    limited={
        "hidden_act": ("silu", "swish"),
        "is_decoder": (True,),
        "moe_norm_min": (1e-12,),
        "num_experts": (0,),
        "num_local_experts": (0,),
        "n_routed_experts": (0,),
        "num_experts_per_tok": (0,),
        "n_shared_experts": (0,),
        "shared_expert_intermediate_size": (0,),
        "moe_layer_freq": (1,),
        "partial_rotary_factor": (1, 1.0),
        "rotary_pct": (1, 1.0),
        "layer_types": ("full_attention",),
        "experts_per_token": Same("num_experts_per_tok"),
        "layer_norm_epsilon": Same("norm_epsilon"),
        "sliding_window_size": Same("sliding_window"),
    },
)  # fmt: skip
"""Of the settings of a language model; those of a wrapper around it are its own."""

GGUF = KnownKeys(
    "metadata of GGUF files, after the architecture's name and a dot",
    harmless={
        "of what the tensors say": "vocab_size leading_dense_block_count tensor_data_layout embedding_length_out",
        "of how other engines run the model": "pooling_type rope.scaling.finetuned attention.layer_norm_epsilon",
        "token ids, which are read where ends of a turn are": "decoder_start_token_id",
        "of layers that only draft tokens": "nextn_*",
        "of scaling that the kind of rotary embedding does not have": "rope.scaling.original_context_length",
    },
    limited={
        "attention.causal": (True,),
        "attention.max_alibi_bias": (0.0,),
        "attention.clamp_kqv": (0.0,),
        "attention.scale": (0.0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_shared_count": (0,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_gating_func": (0, 1),
        "expert_feed_forward_length": (),
        "expert_shared_feed_forward_length": (0,),
        "interleave_moe_layer_step": (0, 1),
        "moe_every_n_layers": (0, 1),
        "attention.sliding_window": (0,),
        "attention.q_lora_rank": (0,),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_beta_fast": (32.0,),
        "rope.scaling.yarn_beta_slow": (1.0,),
        "logit_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "embedding_scale": (0.0, 1.0),
        "attn_logit_softcapping": (0.0,),
        "use_parallel_residual": (False,),
        "full_attention_interval": (0, 1),
    },
)
"""Settings of tokenizers (``tokenizer.ggml.*``) are the tokenizer's; ``general.*`` and other programs' say nothing of numbers."""
