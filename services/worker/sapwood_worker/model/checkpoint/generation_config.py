"""Defaults of sampling that a model's ``generation_config.json`` gives, as vLLM and SGLang apply them."""

from __future__ import annotations

import logging
import math
from contextlib import closing
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.end_tokens import end_ids, turn_ends
from sapwood_common.models.gguf_file import GgufError, GgufFile
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.families.known_keys import KnownKeys, refusal, short

logger = logging.getLogger(__name__)


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "top_k": (-1, 2**31 - 1),
    "repetition_penalty": (0.0, math.inf),
}  # fmt: skip
"""The least and the most of each."""
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp", "top_p": "general.sampling.top_p", "min_p": "general.sampling.min_p",
    "top_k": "general.sampling.top_k", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
"""The keys of the same in GGUF files."""
_DIGITS = 6
"""Of a number that a GGUF file stores as float32."""
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
    """The defaults of a Hugging Face directory, or those next to a GGUF file, or in it; the log names what cannot be one.

    Raises:
        ConfigError: The file cannot be read, or has a setting that is not known; names both.
    """
    path = (model if model.is_dir() else model.parent) / "generation_config.json"
    if path.is_file():
        values = read_json_object(path)
        if refused := GENERATION.refused(values):
            raise ConfigError(refusal(str(path), refused))
    elif model.is_file():
        path, values = model, _sampling_of(model)
    else:
        return {}
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


def _sampling_of(path: Path) -> dict[str, Any]:
    """The defaults that a GGUF file holds."""
    try:
        with closing(GgufFile(path)) as file:
            found = {name: file.metadata[key] for name, key in SAMPLING_KEYS.items() if key in file.metadata}
    except GgufError as error:
        raise ConfigError(str(error)) from error
    return {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in found.items()}


# The tokens that end an answer of a model: those of its settings, its tokenizer's own and its chat template's.


_CONTROL, _USER_DEFINED = 3, 4


def read_hf_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End tokens of a Hugging Face directory; ids that are none are dropped, with a line in the log.

    ``eos_token_id`` of generation_config.json, or of config.json if that has none; ``eos_token`` of the tokenizer; and the tokens
    that end a turn in the chat template.

    Raises:
        ConfigError: A file cannot be read.
    """
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        values = _read(directory / file)
        nested = values.get("text_config")
        for each in (values, nested if isinstance(nested, dict) else {}):
            if not ids:
                ids = end_ids(each.get("eos_token_id"), vocab_size, f"{directory / file}: eos_token_id")
    settings = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
    added = _added_tokens(directory, settings)
    named = settings.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str):
        own = added.get(text)
        own = _in_vocabulary(directory, text) if own is None else own
        ids += end_ids(own, vocab_size, f"{directory / 'tokenizer_config.json'}: eos_token")
    ends = turn_ends(added, _template(directory, settings))
    ids += [each for each in ends if each < vocab_size]
    return tuple(dict.fromkeys(ids))


def read_gguf_eos(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    """The same of a GGUF file: what the metadata names, and special tokens that end a turn."""
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ids += end_ids(file.metadata.get(key), vocab_size, f"{file.path}: {key}")
    ids += end_ids(file.metadata.get("tokenizer.ggml.eos_token_ids"), vocab_size, f"{file.path}: eos_token_ids")
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    special = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    }
    template = file.metadata.get("tokenizer.chat_template")
    ids += turn_ends(special, template if isinstance(template, str) else None)
    return tuple(sorted({each for each in ids if each < vocab_size}))


def _added_tokens(directory: Path, settings: dict[str, Any]) -> dict[str, int]:
    """The added tokens, special ones and others, by their text."""
    listed = settings.get("added_tokens_decoder")
    found = {}
    if isinstance(listed, dict):
        found = {
            token["content"]: int(index)
            for index, token in listed.items()
            if index.isdigit() and isinstance(token, dict) and isinstance(token.get("content"), str)
        }
    if not found:
        added = _read(directory / "tokenizer.json").get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str):
                found[token["content"]] = token["id"]
    more = _read(directory / "added_tokens.json")
    return found | {text: index for text, index in more.items() if isinstance(index, int)}


def _in_vocabulary(directory: Path, text: str) -> int | None:
    model = _read(directory / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    index = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return index if isinstance(index, int) else None


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8", "replace")
    found = settings.get("chat_template", _read(directory / "chat_template.json").get("chat_template"))
    if isinstance(found, list):
        found = next((each.get("template") for each in found if isinstance(each, dict)), None)
    return found if isinstance(found, str) else None


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}
