"""Defaults of sampling that a model's ``generation_config.json`` gives, as vLLM and SGLang apply them."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.families.known_keys import KnownKeys, refusal, short

logger = logging.getLogger(__name__)

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "top_k": (-1, 2**31 - 1),
    "repetition_penalty": (0.0, math.inf),
}  # fmt: skip
"""The least and the most of each."""
GENERATION = KnownKeys(
    "generation_config.json",
    read=("eos_token_id", *_RANGES),
    harmless={
        "names and versions": "_* transformers_version trust_remote_code model_type cache_implementation cache_config",
        "token ids that end no answer": "bos_token_id pad_token_id decoder_start_token_id unk_token_id sep_token_id",
        "of answers that a request asks for by itself; vLLM and SGLang do not apply them either": """
            do_sample max_length max_new_tokens min_length min_new_tokens num_beams num_beam_groups num_return_sequences
            early_stopping length_penalty diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
            typical_p epsilon_cutoff
            eta_cutoff penalty_alpha top_h presence_penalty frequency_penalty guidance_scale suppress_tokens begin_suppress_tokens
            bad_words_ids forced_bos_token_id forced_eos_token_id max_time stop_strings renormalize_logits remove_invalid_values
            exponential_decay_length_penalty sequence_bias token_healing watermarking_config encoder_repetition_penalty
            constraints force_words_ids prompt_lookup_num_tokens num_assistant_tokens* assistant_* max_matching_ngram_size
            dola_layers low_memory is_assistant target_lookbehind assistant_lookbehind
        """,
        "of how other engines run the model": """
            use_cache return_dict_in_generate output_attentions output_hidden_states output_scores output_logits disable_compile
            compile_config prefill_chunk_size chat_format user_token_id assistant_token_id
            max_window_size continuous_batching_config
        """,
    },
)


def read_sampling_defaults(model: Path) -> dict[str, float]:
    """The defaults of a Hugging Face directory, or those next to a GGUF file; the log names what cannot be one.

    Raises:
        ConfigError: The file cannot be read, or has a setting that is not known; names both.
    """
    path = (model if model.is_dir() else model.parent) / "generation_config.json"
    if not path.is_file():
        return {}
    values = read_json_object(path)
    if refused := GENERATION.refused(values):
        raise ConfigError(refusal(str(path), refused))
    found: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        fine = fine and least <= value <= most and (name != "top_k" or value == int(value))
        fine = fine and (value > 0 or name not in ("top_p", "repetition_penalty"))
        if not fine:
            logger.warning("%s: %s is %s, which it cannot be; it is ignored", path, name, short(value))
        elif name == "top_k":
            if value > 0:
                found[name] = int(value)
        else:
            found[name] = float(value)
    return found
