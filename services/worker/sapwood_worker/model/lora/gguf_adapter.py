"""Adapters in llama.cpp's format: a ``.gguf`` file of the type ``adapter``, written by its ``convert_lora_to_gguf.py``."""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from pathlib import Path

import torch

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile
from sapwood_worker.model.checkpoint.gguf_source import canonical, halves, is_rotated, read_tensor
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import ModelFamily
from sapwood_worker.model.lora.adapter import Adapter, Limits, Pair, assert_finite, refused

_ENDS = {".lora_a": 0, ".lora_b": 1}


def read_gguf_adapter(path: Path, limits: Limits, family: ModelFamily, config: ModelConfig) -> Adapter:
    """Reads an adapter.

    Args:
        path: The file.
        limits: What may be in it.
        family: The model's family; a file for another one is refused.
        config: The model's configuration.

    Raises:
        InvalidArgumentError: It cannot be served; names the file, and the setting or the tensor and its module.
    """
    try:
        with closing(GgufFile(path)) as file:
            return _read(path, file, limits, family, config)
    except (GgufError, ConfigError) as error:
        raise refused(path, str(error).removeprefix(f"{path}: ")) from error


def _read(path: Path, file: GgufFile, limits: Limits, family: ModelFamily, config: ModelConfig) -> Adapter:
    kind, form = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != "adapter" or form != "lora":
        raise refused(path, f"general.type is {kind!r} and adapter.type {form!r}: it is no LoRA adapter")
    named, own = file.metadata.get("general.architecture"), family.gguf_name or family.name
    if named != own:
        raise refused(path, f"general.architecture is {named!r}; the model's is {own!r}")
    alpha = file.metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise refused(path, f"adapter.lora.alpha is {alpha!r:.80}; it can be a number")
    found: dict[str, dict[int, str]] = {}
    for name, tensor in sorted(file.tensors.items()):
        end = next((end for end in _ENDS if name.endswith(end)), "")
        module = canonical(name.removesuffix(end), family.gguf_names).removesuffix(".weight")
        if not end:
            raise refused(path, f"tensor {name} of {module}: it is no matrix of LoRA")
        limits.check_module(path, name, module)
        limits.check_shape(path, name, module, tensor.shape, second=bool(_ENDS[end]))
        found.setdefault(module, {})[_ENDS[end]] = name
    if not found:
        raise refused(path, "holds no tensors")
    hashed = hashlib.sha256(repr((named, float(alpha))).encode())
    pairs = {}
    for module, names in found.items():
        for place, end in enumerate(_ENDS):
            if place not in names:
                raise refused(path, f"tensor {names[1 - place].rpartition('.')[0]}{end} is missing")
        matrices = []
        for place in (0, 1):
            values = read_tensor(file, file.tensors[names[place]])
            hashed.update(f"{names[place]} {values.shape}".encode())
            hashed.update(values.tobytes())
            matrices.append(torch.from_numpy(values))
        a, b = matrices
        if a.shape[0] != b.shape[1]:
            raise refused(
                path, f"tensor {names[1]} of {module} has rank {b.shape[1]}, {names[0]} has rank {a.shape[0]}"
            )
        if family.gguf_interleaves and is_rotated(f"{module}."):
            if b.shape[0] % config.head_dim:
                raise refused(path, f"tensor {names[1]} of {module} has {b.shape[0]} rows, which are no whole heads")
            b = halves(b, config.head_dim)
        # As llama.cpp has it: an alpha of 0 is a factor of 1.
        pair = pairs[module] = Pair(a, b, float(alpha) / a.shape[0] if alpha else 1.0, (names[0], names[1]))
        assert_finite(path, module, pair)
    return Adapter(str(path), hashed.digest(), pairs)
