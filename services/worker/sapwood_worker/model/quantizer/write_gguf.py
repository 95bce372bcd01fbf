"""Writes a GGUF file of a Hugging Face directory.

Names, order of rows and settings are those by which ``checkpoint/gguf_source.py`` reads such files. Before a tensor is written,
the settings are read back and compared with the checkpoint's: what a file cannot say is refused.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
import torch

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufFile
from sapwood_common.models.progress import Progress
from sapwood_worker.model.checkpoint.generation_config import (
    SAMPLING_KEYS,
    read_gguf_eos,
    read_hf_eos,
    read_sampling_defaults,
)
from sapwood_worker.model.checkpoint.gguf_source import is_rotated, neighbours, read_gguf_config, stored_name
from sapwood_worker.model.checkpoint.hf_config import read_hf_config
from sapwood_worker.model.checkpoint.safetensors_source import SafetensorsSource
from sapwood_worker.model.checkpoint.settled import settle
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.registry import families
from sapwood_worker.model.families.values import ROPE_DIVISORS, gguf_divisors
from sapwood_worker.model.layers.rotary import RopeConfig, inverse_frequencies
from sapwood_worker.model.quantizer.quantize import check_paths
from sapwood_worker.model.weight_slot import StoredTensor, WeightSlot, why_no_numbers

_Type = gguf.GGMLQuantizationType
GGUF_TYPES: Mapping[str, Any] = {
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "f32": gguf.LlamaFileType.ALL_F32,
}
"""The types of matrices that are written, and what a file of each is called in ``general.file_type``."""
_FOUR_OR_FIVE_BITS = ("q5_1", "q5_0", "q4_1", "q4_0")
_LARGEST_HALF = 65_504.0
_MATRIX = 2
_PART = 1 << 22
"""Numbers that are rounded at a time."""
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_BLOCK_FORMAT_VERSION = 2
_CLOSE = 1e-6
"""Relative difference of numbers that a file stores as float32."""
_NAMES = {
    "windows": "sliding_window or layer_types", "ropes": "rope_parameters", "attention_scale": "query_pre_attn_scalar",
    "activation": "hidden_act", "max_position": "max_position_embeddings",
}  # fmt: skip
"""What ``config.json`` calls settings that have another name in :class:`ModelConfig`."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor to be written: its name in the checkpoint, None for divisors of rotary frequencies, and its type and shape."""

    ours: str | None
    kind: Any
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // per_block * int(block_bytes)


@torch.inference_mode()
def write_gguf(
    source: Path, target: Path, kind: str, name: str, tokenizer: Mapping[str, Any], progress: Progress
) -> list[str]:
    """Writes the file. It has its name once it is whole.

    Args:
        source: A Hugging Face directory.
        target: The file.
        kind: A key of ``GGUF_TYPES``: the type of matrices. Vectors are F32. With 4 or 5 bits the output head, or the embedding
            that is one, has 8.
        name: What the model is called, ``general.name``.
        tokenizer: The metadata of its tokenizer.
        progress: Told how far it is.

    Returns:
        The file's names of matrices whose rows are no whole blocks of the type, so that they are F16.

    Raises:
        ConfigError: The source cannot be read, or cannot be written so; or the target is there, or there is no room for it.
        OSError: The file cannot be written.
    """
    check_paths(source, target)
    model = _Checkpoint(source)
    asked = getattr(_Type, kind.upper())
    settings = model.settings(kind, name) | dict(tokenizer)
    settings |= _end_tokens(read_hf_eos(source, model.config.vocab_size), tokenizer)
    planned = dict(model.plan(asked))
    with _unfinished(target) as file:
        writer = gguf.GGUFWriter(file.name, model.architecture)
        for key, value in settings.items():
            _add(writer, key, value)
        for stored, tensor in planned.items():
            writer.add_tensor_info(stored, tensor.shape, np.dtype(np.float32), tensor.bytes, tensor.kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            for each in writer.fout or ():
                each.close()
        model.compare(Path(file.name))
        total = sum(tensor.bytes for tensor in planned.values())
        free = shutil.disk_usage(target.parent).free
        if free < total:
            raise ConfigError(f"{target}: it takes {total / 1e6:.1f} MB, and {free / 1e6:.1f} MB of its disk are free")
        done = 0
        file.seek(0, 2)
        for tensor in planned.values():
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for part in model.read(tensor):
                file.write(part.data)
            done += tensor.bytes
            progress("writing", done, total)
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
    return [
        stored for stored, each in planned.items() if each.kind == _Type.F16 != asked and len(each.shape) == _MATRIX
    ]


class _Checkpoint:
    """The checkpoint, as a GGUF file has it. Raises ConfigError: it cannot be written so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        family, config = read_hf_config(path)
        written = sorted(each.name for each in families() if each.to_gguf is not None)
        if family.to_gguf is None or config.labels is not None:
            what = family.name if config.labels is None else f"{family.name} with a head that classifies"
            raise ConfigError(
                f"{path / 'config.json'}: {what}: no GGUF file of it can be written (of these one can: {', '.join(written)})"
            )
        fused, groups = family.fused(config), family.groups(config)
        self._source = SafetensorsSource(path, family, tied=False, fused=fused, groups=groups)
        self.config, headless = settle(config, self._source, path)
        if headless:
            raise ConfigError(f"{path}: it has no output head, and a GGUF file of it would be one that generates text")
        self._family, self._tensors = family, self._source.tensors()
        self._divisors = self._rope_divisors()

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return self._family.gguf_name or self._family.name

    def settings(self, kind: str, name: str) -> dict[str, Any]:
        """All settings but the tokenizer's, by their keys."""
        assert self._family.to_gguf is not None
        own = self._family.to_gguf(self.config)
        return {
            "general.type": "model",
            "general.name": name,
            "general.file_type": int(GGUF_TYPES[kind]),
            "general.quantization_version": _BLOCK_FORMAT_VERSION,
            **{f"{self.architecture}.{key}": value for key, value in own.items()},
            **{SAMPLING_KEYS[each]: value for each, value in read_sampling_defaults(self._path).items()},
        }

    def plan(self, asked: Any) -> Iterator[tuple[str, _Planned]]:
        """What is written, by the file's names, in order."""
        if self._divisors is not None:
            yield ROPE_DIVISORS, _Planned(None, _Type.F32, (len(self._divisors),))
        found = {stored_name(ours, self._family.gguf_names): ours for ours in self._tensors}
        for stored, ours in found.items():
            tensor = self._tensors[ours]
            if stored == ours:
                raise ConfigError(f"{self._source.where(ours)}: tensor {ours}: GGUF files have no name for it")
            if why := why_no_numbers(ours, self._tensors):
                raise ConfigError(f"{self._source.where(ours)}: tensor {ours} ({tensor.dtype}): {why}")
            yield stored, _Planned(ours, self._kind(stored, tensor, asked), tensor.shape)

    def _kind(self, stored: str, tensor: StoredTensor, asked: Any) -> Any:
        if len(tensor.shape) < _MATRIX:
            return _Type.F32
        head = _EMBEDDING if self.config.tie_word_embeddings else _HEAD
        if stored == head and asked.name.lower() in _FOUR_OR_FIVE_BITS:
            asked = _Type.Q8_0
        per_block, _ = gguf.GGML_QUANT_SIZES[asked]
        return _Type.F16 if tensor.shape[-1] % per_block else asked

    def read(self, planned: _Planned) -> Iterator[npt.NDArray[Any]]:
        """A tensor's bytes, in parts."""
        if planned.ours is None:
            yield np.array(self._divisors, np.float32)
            return
        values = torch.empty(planned.shape, dtype=torch.float32)
        self._source.read_into(planned.ours, WeightSlot(values))
        if planned.ours.endswith("norm.weight"):
            values += self.config.norm_offset  # these files hold the factor itself
        if self._family.gguf_interleaves and is_rotated(planned.ours):
            values = neighbours(values, self.config.head_dim)
        largest = float(torch.stack(torch.aminmax(values)).abs().max()) if values.numel() else 0.0
        fits = largest <= _LARGEST_HALF if planned.kind not in (_Type.F32, _Type.BF16) else math.isfinite(largest)
        if not fits:
            raise ConfigError(
                f"{self._source.where(planned.ours)}: tensor {planned.ours} holds {largest}, which {planned.kind.name} cannot"
            )
        step = max(_PART // max(values[:1].numel(), 1), 1)
        for start in range(0, len(values), step):
            yield np.ascontiguousarray(gguf.quantize(values[start : start + step].numpy(), planned.kind))

    def _rope_divisors(self) -> tuple[float, ...] | None:
        rope = next((each for each in self.config.ropes if each is not None), None)
        return None if rope is None else gguf_divisors(rope, self.config.head_dim)

    def compare(self, path: Path) -> None:
        """Raises ConfigError unless a file's settings are read as the checkpoint's are; names those of ``config.json``."""
        with closing(GgufFile(path)) as file:
            divisors = {} if self._divisors is None else {ROPE_DIVISORS: self._divisors}
            _, found = read_gguf_config(file, divisors)
            ends = set(read_gguf_eos(file, self.config.vocab_size))
        assert ends >= set(read_hf_eos(self._path, self.config.vocab_size))
        theirs = replace(found, architecture=self.config.architecture, draft_layers=self.config.draft_layers)
        differing = [
            each.name
            for each in fields(ModelConfig)
            if not _alike(getattr(self.config, each.name), getattr(theirs, each.name), self.config)
        ]
        if differing:
            named = ", ".join(_NAMES.get(each, each) for each in differing)
            raise ConfigError(
                f"{self._path / 'config.json'}: {named}: a GGUF file of {self.architecture} cannot say what is set there"
            )


def _alike(ours: Any, theirs: Any, config: ModelConfig) -> bool:
    match ours:
        case float() | int():
            return isinstance(theirs, (float, int)) and math.isclose(ours, theirs, rel_tol=_CLOSE)
        case tuple():
            return len(ours) == len(theirs) and all(map(_alike, ours, theirs, [config] * len(ours)))
        case RopeConfig():
            return isinstance(theirs, RopeConfig) and _turn_alike(ours, theirs, config)
        case _:
            return bool(ours == theirs)


def _turn_alike(ours: RopeConfig, theirs: RopeConfig, config: ModelConfig) -> bool:
    """Whether two rotary embeddings, which may say the same otherwise, turn all pairs by the same angles."""
    mine, other = (replace(each, theta=1.0, scaling=None, divisors=None) for each in (ours, theirs))
    one, two = (1.0 if each.scaling is None else each.scaling.magnitude for each in (ours, theirs))
    size = ours.rotated or config.head_dim
    here, there = (inverse_frequencies(size, each, config.max_position) for each in (ours, theirs))
    return (
        mine == other and math.isclose(one, two, rel_tol=_CLOSE) and torch.allclose(here, there, rtol=_CLOSE, atol=0.0)
    )


def _end_tokens(ends: tuple[int, ...], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The end tokens that the tokenizer's metadata do not name, so that a worker ends texts at the same ones."""
    named = tokenizer.get("tokenizer.ggml.eos_token_id")
    every = list(dict.fromkeys([*([] if named is None else [named]), *ends]))
    found = {} if named is not None or not every else {"tokenizer.ggml.eos_token_id": every[0]}
    return found | ({"tokenizer.ggml.eos_token_ids": every} if len(every) > 1 else {})


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


@contextmanager
def _unfinished(target: Path) -> Iterator[BinaryIO]:
    """A file beside the target that gets its name at the end, and is removed if that is not reached.

    What a killed process left is overwritten.

    Raises:
        ConfigError: The target is there, or another process writes it.
        OSError: No file can be made there, or written; names it.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already")
    path = target.with_name(f".{target.name}.unfinished")
    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{target}: another process is writing it") from None
        if (
            not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino
        ):  # it was renamed or removed meanwhile
            raise ConfigError(f"{target}: another process was writing it until now")
        try:
            yield file
            file.flush()
            if target.exists():
                raise ConfigError(f"{target} is there already")
            path.rename(target)
        except OSError as error:
            if error.filename is None:
                error.filename = str(target)
            path.unlink(missing_ok=True)
            raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
