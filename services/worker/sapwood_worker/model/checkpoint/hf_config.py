"""Reads ``config.json`` of a Hugging Face model directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_object
from sapwood_worker.model.checkpoint.wrapped import language_part
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily, read_labels
from sapwood_worker.model.families.known_keys import CONFIG, KnownKeys, refusal, short
from sapwood_worker.model.families.registry import families
from sapwood_worker.model.families.values import HfValues, Settings, check_counts


def read_hf_config(directory: Path) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a Hugging Face model directory.

    Raises:
        ConfigError: Unreadable, or something in it is not supported, or nothing reads it; names the file and what.
    """
    path = directory / "config.json"
    raw = read_json_object(path)
    name = _architecture(raw, path)
    known = {name: family for family in families() for name in (*family.architectures, *family.classifiers)}
    bare = {
        name.replace("ForCausalLM", "Model"): family for name, family in known.items() if name.endswith("ForCausalLM")
    }
    part = language_part(raw, name, {**bare, **known}, path)
    if part is None:
        alike = get_close_matches(name, known, 3)
        shown = f", such as {', '.join(alike)}" if alike else ""
        raise ConfigError(
            f"{path}: architecture {name} is not supported; {len(known)} are{shown}: docs/models.md lists them"
        )
    family, given = part.family, Settings(part.settings)
    values = given.over({**family.defaults, **part.defaults})
    try:
        check_counts({key: each for key, each in part.settings.items() if each is not None}, family.defaults)
        _check_kinds(part.settings)
        config = family.from_hf(HfValues(family.name, given, values))
        if name in family.classifiers:
            config = replace(config, labels=read_labels(raw))
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        last = given.reads.last.partition(".")[0]
        shown = f"{last} ({short(part.settings.get(last, family.defaults.get(last)))})"
        raise ConfigError(f"{path}: {shown} is not what such a setting can be: {error}") from error
    _refuse_unread(path, family, given, part.own)
    return family, config


def _refuse_unread(path: Path, family: ModelFamily, given: Settings, own: frozenset[str]) -> None:
    """Raises ConfigError if the file has settings that nothing reads and that are not known to be harmless.

    Args:
        path: The file.
        family: The model's family.
        given: The settings, as they were read.
        own: Those that are the language model's, not a wrapper's.
    """
    if given.get("use_sliding_window", True) is False:
        given.idle("sliding_window", "max_window_layers", "layer_types")
    if given.same("rope_parameters", "rope_scaling"):
        given.idle(*(name for name in given.flat() if name.partition(".")[0] == "rope_scaling"))
    unread = {name: value for name, value in given.unread().items() if name.partition(".")[0] in own}
    refused = CONFIG.refused(unread, family.unread, given.flat())
    if refused:
        raise ConfigError(refusal(str(path), refused))


def _check_kinds(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting whose value is of another kind than all files have there; names it."""
    for key in ("rope_parameters", "rope_scaling"):
        if settings.get(key) is not None and not isinstance(settings[key], dict):
            raise ValueError(f"{key} is {short(settings[key])}; it can be an object")
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers", "mlp_only_layers", "moe_layers"):
        if settings.get(key) is not None and not isinstance(settings[key], list):
            raise ValueError(f"{key} is {short(settings[key])}; it can be a list")


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    names = raw.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"{path}: architectures is {short(names)}; it can be a list of names")
    return names[0]


def classifies(directory: Path) -> bool:
    """Whether the model of a directory is one of a family's with a head that classifies. Raises ConfigError: unreadable."""
    path = directory / "config.json"
    name = _architecture(read_json_object(path), path)
    return any(name in family.classifiers for family in families())


# How a Hugging Face directory says that its weights are quantised, and which of its settings are known.


_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Settings files of AutoGPTQ and AutoAWQ, and the method that each means if it names none. Some checkpoints have no other
settings."""
_HARMLESS = {
    "which weights are quantised: the tensors say it": """
        modules_to_not_convert ignored_layers ignore exclude_modules modules_in_block_to_quantize block_name_to_quantize
        module_name_preceding_first_block unquantized_modules inside_layer_modules llm_int8_skip_modules
    """,
    "names and versions": "quant_library producer version meta name model_name_or_path model_file_base_name",
    "of how other engines load or compute": """
        backend use_exllama disable_exllama exllama_config use_cuda_fp16 cache_block_outputs max_input_length offload_to_disk*
        pack_impl do_fuse fuse_max_seq_len modules_to_fuse dequantize run_compressed is_marlin_format device adapter
    """,
    "of calibration and of how the numbers were found": """
        damp_* dataset tokenizer batch_size pad_token_id model_seqlen static_groups true_sequential mse act_group_aware gptaq* v2
        v2_alpha fail_safe failsafe* hyb_act parallel_packing vram_strategy quantization_status global_compression_ratio
        duo_scaling
        n_parallel_calib_samples max_calib_* calib* apply_clip observer observer_kwargs wait_for_submodule_finalizers
        auto_forward_data_parallel moe lr iters nsamples seqlen low_gpu_mem_usage enable_* autoround_version act_*
        super_* minmax_lr
        gradient_accumulate_steps scale_dtype zp_dtype sampler to_quant_block_names amp
    """,
    "of how activations are rounded: ours have a scale for each token, or stay as they are": """
        activation_scale_ub scale_fmt input_activations output_activations
    """,
    "of the KV cache, whose type --kv-cache-dtype sets": "kv_cache_scheme kv_cache_quant*",
}


def _known(*read: str, **limited: tuple[Any, ...]) -> KnownKeys:
    return KnownKeys("quantization_config", (*read, "quant_method"), _HARMLESS, limited)


_FORMATS = ("gptq", "gptq_v2")
_FLOAT8 = ("e4m3", "float8_e4m3", "float8_e4m3fn")
_MODELOPT = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP4", "W4A16_MXFP4"),
    "MIXED_PRECISION",
)
_BITSANDBYTES = """
    load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_quant_storage
    bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold
"""
METHODS: Mapping[str, KnownKeys] = {
    "gptq": _known(
        *("bits", "group_size", "desc_act", "sym", "checkpoint_format", "dynamic", "lm_head"),
        format=_FORMATS,
        method=("gptq",),
        pack_dtype=("int32",),
    ),
    "awq": _known(
        *("bits", "w_bit", "group_size", "q_group_size", "version", "lm_head"),
        zero_point=(True,),
        format=("gemm", "GEMM"),
        method=("awq",),
        pack_dtype=("int32",),
    ),
    "fp8": _known("activation_scheme", "weight_block_size", "is_checkpoint_fp8_serialized", fmt=_FLOAT8),
    "fbgemm_fp8": _known("activation_scheme", "weight_block_size"),
    "mxfp4": _known(),
    "modelopt": _known("group_size", "config_groups", "quantized_layers", quant_algo=_MODELOPT),
    "compressed-tensors": _known("config_groups", "format", "weight_block_size", "sparsity_config", "transform_config"),
    "bitsandbytes": _known(*_BITSANDBYTES.split()),
}
"""By method; those of other packages read and check their settings themselves."""
_ALIASES = {"gptqmodel": "gptq", "sparseml": "compressed-tensors"}
_GROUP = KnownKeys(
    "a group of config_groups",
    ("targets", "weights", "format"),
    _HARMLESS,
)
_WEIGHTS = KnownKeys(
    "weights of a group of config_groups",
    ("num_bits", "type", "group_size", "strategy", "block_structure", "symmetric", "actorder"),
    _HARMLESS,
    {"dynamic": (False,)},
)
_AT_RUN_TIME = ("input", "output", "k_cache", "q_attn", "attn", "embed_output")
"""Where compressed-tensors' rotations act while the model runs; those in weights are in the numbers already."""
_COUNTS = ("bits", "w_bit", "group_size", "q_group_size", "num_bits")


def read_hf_quantization(directory: Path) -> Mapping[str, Any]:
    """How the files say that weights are quantised, as ``quantization_config`` of ``config.json`` does; empty if they are not.

    Older checkpoints say it in files of their own: modelopt's ``hf_quant_config.json``, AutoGPTQ's ``quantize_config.json`` and
    AutoAWQ's ``quant_config.json``.

    Raises:
        ConfigError: A setting is not known, or not of the kind that it has to be; names the file and the setting.
    """
    where, found = _find(directory)
    if not found:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {short(found)}; it can be an object")
    method = str(found.get("quant_method") or "").lower()
    known = METHODS.get(_ALIASES.get(method, method))
    if known is None:  # none, or another package's
        return found
    for settings, keys, inside in _objects(found, known, where):
        if not isinstance(settings, dict):
            raise ConfigError(f"{where}: {inside} is {short(settings)}; it can be an object")
        if refused := keys.refused(settings):
            names = {f"{inside}.{name}" if inside else name: value for name, value in refused.items()}
            raise ConfigError(refusal(where, names))
        for name in _COUNTS:
            value = settings.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError(f"{where}: {name} is {short(value)}; it can be a whole number")
    _check_groups(found, where)
    _check_transforms(found, where)
    return found


def _find(directory: Path) -> tuple[str, Any]:
    """The settings, and what to call the place where they are."""
    file = directory / "config.json"
    raw = read_json_object(file)
    inner = raw.get("text_config")
    for settings, place in ((raw, ""), (inner, "text_config.")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(settings, dict) and settings.get(key):
                return f"{file}: {place}{key}", settings[key]
    modelopt = directory / "hf_quant_config.json"
    if modelopt.exists():
        own = read_json_object(modelopt).get("quantization") or {}
        return str(modelopt), {"quant_method": "modelopt", **own} if isinstance(own, dict) else own
    for name, method in _OWN_FILES.items():
        if (directory / name).exists():
            return str(directory / name), {"quant_method": method, **read_json_object(directory / name)}
    return str(file), {}


def _objects(found: dict[str, Any], known: KnownKeys, where: str) -> Iterator[tuple[Any, KnownKeys, str]]:
    yield found, known, ""
    groups = found.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise ConfigError(f"{where}: config_groups is {short(groups)}; it can be an object")
    for name, group in groups.items():
        yield group, _GROUP, f"config_groups.{name}"
        if group.get("weights") is not None:
            yield group["weights"], _WEIGHTS, f"config_groups.{name}.weights"


def _check_groups(found: Mapping[str, Any], where: str) -> None:
    for name, group in (found.get("config_groups") or {}).items():
        targets = group.get("targets", [])
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            raise ConfigError(f"{where}: config_groups.{name}.targets is {short(targets)}; it can be a list of names")
        for each in targets:
            try:
                re.compile(each.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(f"{where}: config_groups.{name}.targets: {each!r:.60}: {error}") from error
    sparse = found.get("sparsity_config")
    kind = sparse.get("format", "dense") if isinstance(sparse, dict) else sparse or "dense"
    if kind != "dense":
        raise ConfigError(
            f"{where}: sparsity_config.format is {short(kind)}; weights without zeros left out can be read"
        )


def _check_transforms(found: Mapping[str, Any], where: str) -> None:
    """Refuses rotations of activations, which nothing here computes."""
    transforms = found.get("transform_config") or {}
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    if transforms and not isinstance(groups, dict):
        raise ConfigError(refusal(where, {"transform_config": transforms}))
    for name, group in (groups or {}).items():
        applied = group.get("apply") if isinstance(group, dict) else None
        for each in applied if isinstance(applied, list) else [None]:
            location = each.get("location") if isinstance(each, dict) else None
            if location is None or location in _AT_RUN_TIME or not str(location).startswith("weight"):
                what = {f"transform_config.config_groups.{name}.apply.location": location}
                raise ConfigError(refusal(where, what))
