"""How a model's files want sentences embedded, as sentence-transformers writes them down.

``modules.json`` lists what is done one after the other: Transformer, Pooling, Dense, Normalize. ``sentence_bert_config.json``,
or a file that has another model's name there, limits the input, special tokens included; what is longer is cut, not refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood_common.errors import ConfigError
from sapwood_common.models.json_file import read_json_value
from sapwood_common.models.prompts import read_prompts
from sapwood_worker.model.families.known_keys import KnownKeys, refusal

_POOLINGS = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


_LIMITS = KnownKeys(
    "sentence_bert_config.json",
    ("max_seq_length",),
    {
        "of how sentence-transformers runs the model": """
            transformer_task modality_config module_output_name method_output_name unpad_inputs model_args
            tokenizer_args config_args
            processor_kwargs model_kwargs config_kwargs tokenizer_name_or_path backend
        """,
    },
    {"do_lower_case": (False,)},
)
_POOL = KnownKeys(
    "config.json of the folder of a pooling",
    ("pooling_mode", *_LEGACY, "include_prompt"),
    {"of sizes": "word_embedding_dimension embedding_dimension"},
)
_DENSE = KnownKeys(
    "config.json of the folder of a dense module",
    ("in_features", "out_features", "bias", "activation_function"),
    {"of how sentence-transformers runs the module": "module_input_name module_output_name"},
)
_SENTENCES = KnownKeys(
    "config_sentence_transformers.json",
    ("default_prompt_name", "prompts"),
    {"names, versions and what clients compute": "__version__ similarity_fn_name model_type"},
)
SENTENCE_FILES = (_SENTENCES, _LIMITS, _POOL, _DENSE)
"""The known keys of each of their files."""
_NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Kinds of models that sentence-transformers names its file after."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A product that changes pooled vectors.

    Attributes:
        folder: Holds its weights.
        inputs: Numbers of a vector.
        outputs: Numbers of its result.
        bias: Whether a bias is added.
        tanh: Whether tanh is taken of the result.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    tanh: bool


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How to embed a sentence.

    Attributes:
        pooling: ``mean``, ``last`` or ``cls``.
        normalizes: Whether vectors have length 1.
        max_tokens: Longer inputs are cut to this many tokens; 0: no input is cut.
        special_ids: Special tokens; those at an input's end stay when it is cut.
        shortened: Lengths to which vectors may be cut, for which the model was trained; empty: any; None: they may not be cut.
        dense: What changes pooled vectors, in order.
    """

    pooling: str
    normalizes: bool = True
    max_tokens: int = 0
    special_ids: tuple[int, ...] = ()
    shortened: tuple[int, ...] | None = None
    dense: tuple[DenseModule, ...] = ()


def read_sentence_config(path: Path, pooling: str, most: int) -> SentenceConfig:
    """Reads the files.

    Args:
        path: The model's directory, or a file, which says nothing.
        pooling: The pooling if the files do not say.
        most: The most tokens that the model takes.

    Raises:
        ConfigError: They ask for what is not supported, or cannot be read.
    """
    modules = _read(path / "modules.json")
    shortened = _shortened(path / "config.json")
    if modules is None:
        return SentenceConfig(pooling, shortened=shortened)
    normalizes, pools_prompt, dense = False, True, list[DenseModule]()
    if not isinstance(modules, list) or not all(isinstance(each, dict) and "type" in each for each in modules):
        raise ConfigError(f"{path / 'modules.json'}: is no list of modules")
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            file = path / _inside(module, path) / "config.json"
            pooling = _pooling(file)
            pools_prompt = pooling != "mean" or _object(file).get("include_prompt") is not False
        elif kind == "Dense":
            dense.append(_dense(path / _inside(module, path), dense[-1].outputs if dense else None))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{path / 'modules.json'}: module {kind} is not supported (Transformer, Pooling, Dense, Normalize are)"
            )
    _check_prompt(path, pools_prompt=pools_prompt)
    limits = (path / f"sentence_{name}_config.json" for name in _NAMES)
    limit = next((found for file in limits if (found := _known(file, _LIMITS).get("max_seq_length")) is not None), None)
    file = path / "tokenizer_config.json"
    if limit is None:
        limit = _object(file).get("model_max_length", most)
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit >= 1:
        raise ConfigError(
            f"{path}: max_seq_length, or model_max_length of {file.name}, is {limit!r:.60}; it can be a number of tokens"
        )
    added = _object(path / "tokenizer.json").get("added_tokens")
    special = tuple(
        token["id"] for token in added or () if isinstance(token, dict) and token.get("special") and "id" in token
    )
    return SentenceConfig(pooling, normalizes, int(min(limit, most)), special, shortened, tuple(dense))


def _dense(folder: Path, inputs: int | None) -> DenseModule:
    """A module Dense; ``inputs``: what the one before it gives, if there is one."""
    file = folder / "config.json"
    values = _known(file, _DENSE)
    for name in ("in_features", "out_features"):
        if type(values.get(name)) is not int or not 0 < values[name] <= _WIDEST:
            raise ConfigError(f"{file}: {name} is {values.get(name)!r:.60}; it can be a number from 1 to {_WIDEST}")
    if inputs is not None and values["in_features"] != inputs:
        raise ConfigError(
            f"{file}: in_features is {values['in_features']}; the module before it gives {inputs} numbers"
        )
    activation = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ("Tanh", "Identity"):
        raise ConfigError(f"{file}: activation_function {activation:.60} is not supported (Tanh and Identity are)")
    bias = values.get("bias", True) is not False
    return DenseModule(folder, values["in_features"], values["out_features"], bias, activation == "Tanh")


_WIDEST = 1 << 17


def _check_prompt(path: Path, *, pools_prompt: bool) -> None:
    """Refuses a prompt whose tokens are left out of the mean. The tokenizer puts prompts before texts."""
    file = path / "config_sentence_transformers.json"
    _known(file, _SENTENCES)
    if not pools_prompt and any(read_prompts(file).texts.values()):
        raise ConfigError(
            f"{path}: include_prompt is false: the tokens of prompts are to be left out of the mean, which is not supported; "
            f"remove prompts from {file.name}, or include_prompt"
        )


def _inside(module: dict[str, Any], path: Path) -> str:
    """A module's folder, which has to be in the model's."""
    folder = module.get("path", "")
    if not isinstance(folder, str) or folder.startswith("/") or ".." in folder.split("/"):
        raise ConfigError(f"{path / 'modules.json'}: path {folder!r:.60} is no folder within the model's")
    return folder


def _shortened(file: Path) -> tuple[int, ...] | None:
    """The lengths that ``config.json`` allows, as vLLM reads it: ``matryoshka_dimensions``, or any if ``is_matryoshka``."""
    values = _object(file)
    dimensions = values.get("matryoshka_dimensions")
    if dimensions is None:
        return () if values.get("is_matryoshka") is True else None
    if not isinstance(dimensions, list) or not all(isinstance(each, int) and each > 0 for each in dimensions):
        raise ConfigError(f"{file}: matryoshka_dimensions must be a list of numbers over 0, got {dimensions!r}")
    return tuple(dimensions)


def _pooling(file: Path) -> str:
    values = _known(file, _POOL)
    mode = values.get("pooling_mode") or [name for key, name in _LEGACY.items() if values.get(key)] or "mean"
    if isinstance(mode, list) and len(mode) == 1:
        [mode] = mode
    if not isinstance(mode, str) or mode not in _POOLINGS:
        raise ConfigError(f"{file}: pooling {mode!r} is not supported ({', '.join(_POOLINGS)} are)")
    return _POOLINGS[mode]


def _read(file: Path) -> Any:
    """The content of a JSON file; None if there is no such file."""
    try:
        return read_json_value(file)
    except FileNotFoundError:
        return None


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty: there is no such file."""
    found = _read(file)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{file}: holds no JSON object")
    return found or {}


def _known(file: Path, keys: KnownKeys) -> dict[str, Any]:
    """The same, of settings that are all known."""
    found = _object(file)
    if refused := keys.refused(found):
        raise ConfigError(refusal(str(file), refused))
    return found
