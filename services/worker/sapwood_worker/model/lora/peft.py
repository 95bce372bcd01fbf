"""Adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

The header of the file is checked against the model, name by name, before the matrices are read; so no more memory is taken than
the model's adapters can need. Format of the file: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sapwood_common.telemetry.shown_text import cut
from sapwood_worker.model.lora.adapter import Adapter, Limits, Pair, assert_finite, read_bytes, refused

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_CONFIG = 1 << 20
_MOST_HEADER, _HEADER_OF_MODULE = 1 << 16, 1 << 11
"""Bytes of a header, and further ones for each module of the model. Python reads 14 MB of it in 0.4 s, and all steps wait."""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_PREFIX = "base_model.model."
# What other tensors of such a file are, by what is in their names.
_OTHERS = {
    "lora_magnitude_vector": "its DoRA (use_dora) is not served: merge the adapter into the model",
    "lora_embedding": "adapters of embeddings are not served",
    ".lora_B.bias": "biases of adapters (lora_bias) are not served",
    ".bias": "biases that were trained too are not served: train with bias none",
    "modules_to_save": "modules that were trained whole (modules_to_save) are not served: merge the adapter into the model",
}
# Settings that change the numbers, with the values by which they do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None, {}),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
    "velora_config": (None, {}),
    "megatron_config": (None, {}),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_ADVICE = {
    "use_dora": "merge the adapter into the model",
    "modules_to_save": "merge the adapter into the model, or train without",
    "target_parameters": "adapters of single parameters, such as those of experts, must be merged into the model",
    "init_lora_weights": "it changes the model's own weights: save the adapter converted to plain LoRA",
}
_READ = {
    *(
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
    ),
    *("layers_to_transform", "layers_pattern"),
}
# Settings without a meaning for what is computed.
_UNREAD = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *(
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
    ),
    *("qalora_group_size", "ensure_weight_tying"),
}
_MOST_PATTERN, _MOST_REPEATS, _MOST_BARS, _MOST_GROUPS = 256, 2, 8, 3
"""Letters of a pattern, and repetitions, bars and groups with bars in it."""
_PATTERN_SECONDS = 2.0
"""Of CPU time, for all patterns of an adapter."""


def read_peft(folder: Path, limits: Limits, canonical: Callable[[str], str]) -> Adapter:
    """Reads an adapter.

    Args:
        folder: Holds the two files.
        limits: What may be in them.
        canonical: A module's name as the model has it, of the name in its Hugging Face checkpoint.

    Raises:
        InvalidArgumentError: It cannot be served; names the file, and the setting or the tensor and its module.
    """
    where = folder / CONFIG
    given = read_bytes(where, _MOST_CONFIG)
    try:
        config = _Config(where, _object(where, given))
    except RecursionError as error:  # what is deep enough to be read can be too deep to be shown
        raise refused(where, "a setting is nested too deeply") from error
    path = folder / WEIGHTS
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise refused(folder, f"has adapter_model.bin, which may run code: save it as {WEIGHTS}")
    header, begin = _header(path, limits)
    named = dict(_named(path, header, limits, canonical))
    end = begin + sum(_size(path, name, header[name]) for name in header)
    content = read_bytes(path, end)
    if len(content) != end:
        raise refused(path, f"has {len(content)} bytes; its tensors take {end}")
    if _header_of(path, content) != header:
        raise refused(path, "was changed while it was read")
    pairs = {}
    for module, tensors in named.items():
        for letter in "AB":
            if letter not in tensors:
                raise refused(path, f"tensor {module}.lora_{letter}.weight is missing")
        names = tensors["A"], tensors["B"]
        a, b = (_tensor(content, begin, header[name]) for name in names)
        if a.shape[0] != b.shape[1]:
            raise refused(
                path, f"tensor {names[1]} of {module} has rank {b.shape[1]}, {names[0]} has rank {a.shape[0]}"
            )
        rank, stored = config.rank(module), a.shape[0]
        if rank != stored:
            raise refused(path, f"tensor {names[0]} of {module} has rank {stored}, {CONFIG} says {rank}")
        pairs[canonical(module)] = Pair(a, b, config.scale(module, rank), names)
        assert_finite(path, module, pairs[canonical(module)])
    config.check_targets(path, {module: tensors["A"] for module, tensors in named.items()})
    hashed = hashlib.sha256(len(given).to_bytes(8, "little"))
    hashed.update(given)
    hashed.update(content)
    return Adapter(str(path), hashed.digest(), pairs, config.wanted, config.layers, config.excluded)


class _Config:
    """The settings of ``adapter_config.json``.

    Args:
        where: The file.
        given: Its content.

    Attributes:
        wanted, layers, excluded: As :class:`Adapter` has them.
    """

    def __init__(self, where: Path, given: Mapping[str, Any]) -> None:
        self._where, self._given = where, given
        self._pattern_seconds = 0.0
        if str(given.get("peft_type", "")).upper() != "LORA":
            raise refused(where, f"peft_type is {given.get('peft_type')!r:.80}; LORA is served")
        for name, plain in _PLAIN.items():
            value = given.get(name)
            if not any(value == each and type(value) is type(each) for each in plain):
                advice = _ADVICE.get(name, "merge the adapter into the model")
                raise refused(where, f"{name} is {value!r:.80}, which is not served: {advice}")
        for name in given.keys() - _PLAIN.keys() - _READ - _UNREAD:
            if given[name]:
                raise refused(where, f"{cut(name, 80)} is {given[name]!r:.80}: a setting that is not known")
        self._rank = self._number("r", given.get("r"))
        if self._rank != int(self._rank) or self._rank < 1:
            raise refused(where, f"r is {given.get('r')!r:.80}; it can be a whole number from 1 on")
        self._alpha = self._number("lora_alpha", given.get("lora_alpha", 8))
        self._rslora = given.get("use_rslora") or False
        if not isinstance(self._rslora, bool):
            raise refused(where, f"use_rslora is {self._rslora!r:.80}; it can be true or false")
        self._ranks, self._alphas = self._patterns("rank_pattern"), self._patterns("alpha_pattern")
        targets = given.get("target_modules")
        self.wanted: frozenset[str] = frozenset()
        if isinstance(targets, list):
            self.wanted = self._words("target_modules", targets)
        elif not isinstance(targets, str):
            raise refused(where, f"target_modules is {targets!r:.80}; it can be a list of names or a pattern")
        excluded = given.get("exclude_modules") or []
        if isinstance(excluded, str):  # a pattern: which modules it leaves out, the tensors say
            self.wanted, excluded = frozenset(), []
        self.excluded = self._words("exclude_modules", excluded)
        layers = given.get("layers_to_transform")
        if isinstance(layers, int) and not isinstance(layers, bool):
            layers = [layers]
        if layers is not None and not (
            isinstance(layers, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in layers)
        ):
            raise refused(where, f"layers_to_transform is {layers!r:.80}; it can be a list of numbers")
        self.layers = None if layers is None else frozenset(layers)

    def rank(self, module: str) -> int:
        """The rank of a module's matrices, as the settings say."""
        return int(self._first(self._ranks, module, self._rank))

    def scale(self, module: str, rank: int) -> float:
        """The factor of a module's matrices."""
        alpha = self._first(self._alphas, module, self._alpha)
        return alpha / math.sqrt(rank) if self._rslora else alpha / rank

    def check_targets(self, path: Path, tensors: Mapping[str, str]) -> None:
        """Raises InvalidArgumentError if a module that has a tensor is none of ``target_modules``, where that is a list."""
        if not self.wanted:
            return
        for module, tensor in tensors.items():
            if not ends(module, self.wanted):
                raise refused(path, f"tensor {tensor} is unexpected: target_modules of {CONFIG} does not name {module}")

    def _number(self, name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise refused(self._where, f"{cut(name, 80)} is {value!r:.80}; it can be a number")
        return number

    def _words(self, name: str, value: Any) -> frozenset[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise refused(self._where, f"{name} is {value!r:.80}; it can be a list of names")
        return frozenset(value)

    def _patterns(self, name: str) -> Sequence[tuple[re.Pattern[str], float]]:
        value = self._given.get(name) or {}
        if not isinstance(value, dict):
            raise refused(self._where, f"{name} is {value!r:.80}; it can be an object of numbers by names")
        for pattern in value:
            if _is_intricate(pattern):
                raise refused(self._where, f"{name} has the pattern {pattern!r:.80}, which is too intricate")
        made = []
        for pattern, number in value.items():
            with self._timed():
                try:
                    compiled = re.compile(rf"(?:.*\.)?(?:{pattern})")
                except (re.error, OverflowError) as error:
                    raise refused(self._where, f"{name} has the pattern {pattern!r:.80}: {error}") from error
            made.append((compiled, self._number(f"{name}.{pattern}", number)))
        return made

    def _first(self, patterns: Iterable[tuple[re.Pattern[str], float]], module: str, other: float) -> float:
        """The number of the first pattern that a module's name ends with, as PEFT looks for it."""
        for pattern, number in patterns:
            with self._timed():
                if pattern.fullmatch(module):
                    return number
        return other

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts the CPU time of a pattern. Raises InvalidArgumentError if all have taken too much."""
        began = time.thread_time()
        yield
        self._pattern_seconds += time.thread_time() - began
        if self._pattern_seconds > _PATTERN_SECONDS:
            raise refused(self._where, f"its patterns take more than {_PATTERN_SECONDS:.3g} s: write names, or fewer")


def _is_intricate(pattern: str) -> bool:
    """Whether Python's matcher might take a pattern exponential time, in which it holds the interpreter's lock: repetitions of
    repetitions, or many places where a letter may be there or not."""
    plain = pattern.replace("(?", "(")
    repeats, bars = sum(map(plain.count, "*+{?")), plain.count("|")
    many = repeats > _MOST_REPEATS or bars > _MOST_BARS or (bars > 0 and plain.count("(") > _MOST_GROUPS)
    return len(pattern) > _MOST_PATTERN or many or re.search(r"\)[*+{]", plain) is not None


def ends(module: str, names: Set[str]) -> bool:
    """Whether a module's name is, or ends with, one of these."""
    while module not in names:
        _, dot, module = module.partition(".")
        if not dot:
            return False
    return True


def _object(where: Path, given: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise refused(where, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise refused(where, "holds no JSON object")
    return value


def _header(path: Path, limits: Limits) -> tuple[dict[str, Any], int]:
    """The header of the file, by the tensors' names, and where their numbers begin."""
    first = read_bytes(path, 1 << 62, 9)
    length = int.from_bytes(first[:8], "little")
    if first[8:] != b"{" or not 2 <= length <= 1 << 30:
        raise refused(path, "is no safetensors file")
    most = _MOST_HEADER + _HEADER_OF_MODULE * len(limits.modules) * (1 + len(limits.elsewhere))
    if length > most:
        raise refused(path, f"its header has {length} bytes; that of an adapter of this model has at most {most}")
    return _header_of(path, read_bytes(path, 1 << 62, 8 + length)), 8 + length


def _header_of(path: Path, content: bytearray) -> dict[str, Any]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length:
        raise refused(path, "ends in its header")
    header = _object(path, content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


def _size(path: Path, name: str, entry: Any) -> int:
    """Bytes of a tensor, as the header says; checks what it says."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape]
        if not isinstance(dtype, str) or not all(isinstance(each, int) and 0 <= each < 1 << 40 for each in numbers):
            raise ValueError("its numbers are none")
    except (TypeError, KeyError, ValueError) as error:
        raise refused(path, f"tensor {name!r:.200}: the header is damaged: {error}") from error
    if dtype not in _DTYPES:
        raise refused(path, f"tensor {name} is of type {dtype!r:.20}; {', '.join(_DTYPES)} are read")
    if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise refused(path, f"tensor {name} takes {end - begin} bytes, which are none of its shape {shape}")
    return int(end - begin)


def _named(
    path: Path, header: Mapping[str, Any], limits: Limits, canonical: Callable[[str], str]
) -> Iterable[tuple[str, dict[str, str]]]:
    """By module, named as in its checkpoint, the names of its tensors A and B; all are checked."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in sorted(header.items()):
        match = _TENSOR.fullmatch(name)
        if match is None:
            module = name.removeprefix(_PREFIX).rpartition(".")[0]
            why = next((why for part, why in _OTHERS.items() if part in name), "")
            if not why:
                why = "it is no matrix of LoRA" if ".lora_" in name else _OTHERS["modules_to_save"]
            raise refused(path, f"tensor {name!r:.200} of {module!r:.200}: {why}")
        module, letter = match[1], match[2]
        ours = canonical(module)
        limits.check_module(path, name, ours)
        _size(path, name, entry)
        limits.check_shape(path, name, ours, tuple(entry["shape"]), second=letter == "B")
        if found.setdefault(module, {}).setdefault(letter, name) != name:
            raise refused(path, f"tensor {name} is there twice")
    if not found:
        raise refused(path, "holds no tensors")
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    at = 0
    for begin, end in spans:
        if begin != at:
            raise refused(path, "its tensors overlap, or leave gaps")
        at = end
    return found.items()


def _tensor(content: bytearray, begin: int, entry: Mapping[str, Any]) -> Tensor:
    """A tensor of the file; a view of its bytes, not to be changed."""
    dtype = _DTYPES[entry["dtype"]]
    count = math.prod(entry["shape"])
    offset = begin + entry["data_offsets"][0]
    if offset % dtype.itemsize:  # no writer leaves it so; torch cannot read it in place
        content, offset = content[offset : offset + count * dtype.itemsize], 0
    return torch.frombuffer(content, dtype=dtype, count=count, offset=offset).view(entry["shape"])
