"""GGUF files: their names, numbers, settings and tensors.

Tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. GGUF stores Gemma norms as the factor itself (1 + w),
and the query and key rows of Llama in interleaved rotary order, which is undone here.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile, GgufTensor
from sapwood_worker.model.checkpoint.weights import places
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.families.family import FusedRows, ModelFamily
from sapwood_worker.model.families.known_keys import GGUF, refusal, short
from sapwood_worker.model.families.registry import families
from sapwood_worker.model.families.values import ROPE_TENSORS, GgufValues
from sapwood_worker.model.weight_slot import StoredTensor, WeightSlot

# The names of GGUF tensors in Hugging Face checkpoints.


EACH = "*"
"""Stands in a name for an expert's number: one tensor of the file holds those of all experts."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Names with their ends, of tensors that have another end in Hugging Face checkpoints.
_WHOLE = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "attn_sinks.weight": "self_attn.sinks"}
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
"""A tensor of one expert, in Mixtral's files of before April 2024."""
_OUR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z0-9_.]+)\.(weight|bias)")


def block_of(stored: str) -> int | None:
    """The number of the layer that a tensor of the file belongs to; None: it belongs to the whole model."""
    match = _NAME.fullmatch(stored)
    return None if match is None or match[1] is None else int(match[1])


def canonical(stored: str, names: Mapping[str, str]) -> str:
    """A tensor's name in Hugging Face checkpoints; that in the file if it is not known.

    Args:
        stored: Its name in the file.
        names: Names of a layer's tensors in such files that differ from family to family, and in Hugging Face's.
    """
    match = _NAME.fullmatch(stored)
    if match is None:
        return stored
    block, part, kind = match.groups()
    if block is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else stored
    layer = f"model.layers.{block}."
    if (whole := _WHOLE.get(f"{part}.{kind}")) is not None:
        return layer + whole
    if (expert := _EXPERT.fullmatch(part)) is not None:
        return f"{layer}mlp.experts.{expert[2]}.{expert[1]}_proj.{kind}"
    ours = {**_BLOCK, **names}.get(part)
    return f"{layer}{ours}.{kind}" if ours is not None else stored


def stored_name(ours: str, names: Mapping[str, str]) -> str:
    """The files' name of a tensor; Sapwood's name if they have no such tensor.

    Args:
        ours: Its name in Hugging Face checkpoints.
        names: See :func:`canonical`.
    """
    stem, _, kind = ours.rpartition(".")
    top = next((stored for stored, each in _TOP.items() if each == stem), None)
    if top is not None:
        return f"{top}.{kind}"
    match = _OUR_LAYER.fullmatch(ours)
    if match is None:
        return ours
    block, part = match[1], re.sub(r"\.experts\.\d+\.", f".experts.{EACH}.", match[2])
    for stored, each in _WHOLE.items():
        if each == part:
            return f"blk.{block}.{stored}"
    known = {each: stored for stored, each in {**_BLOCK, **names}.items()}
    stem, _, kind = part.rpartition(".")
    return f"blk.{block}.{known[stem]}.{kind}" if stem in known else ours


# The numbers of a GGUF file's tensors.


# Elements dequantised at a time: small enough that temporary arrays stay in the processor's cache.
_CHUNK = 1 << 18
_Q8_0_SIZE = 32


def slab(file: GgufFile, tensor: GgufTensor, first: int, shape: tuple[int, ...]) -> GgufTensor:
    """A part of a tensor that lies together in the file.

    Args:
        file: The open file.
        tensor: The whole.
        first: Numbers before it; whole blocks.
        shape: Its own.

    Raises:
        ConfigError: The tensor's type is unknown.
    """
    per_block, block_bytes = block_size(file, tensor)
    return replace(tensor, shape=shape, offset=tensor.offset + first // per_block * block_bytes)


def expert_of(file: GgufFile, tensor: GgufTensor, expert: int) -> GgufTensor:
    """An expert's matrix of a tensor [E, N, K] that holds those of all.

    Raises:
        ConfigError: The tensor's type is unknown.
    """
    return slab(file, tensor, expert * math.prod(tensor.shape[1:]), tensor.shape[1:])


def block_size(file: GgufFile, tensor: GgufTensor) -> tuple[int, int]:
    """Numbers of a block of a tensor, and its bytes.

    Raises:
        ConfigError: Its type is unknown.
    """
    try:
        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError) as error:
        raise unreadable(file, tensor, error) from error


def read_tensor(file: GgufFile, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """A tensor's values, float32.

    Raises:
        ConfigError: Its type is unknown or the file ends before it.
    """
    values = np.empty(tensor.shape, dtype=np.float32)
    dequantize_into(file, tensor, values, (slice(None),) * len(tensor.shape))
    return values


def dequantize_into(file: GgufFile, tensor: GgufTensor, out: npt.NDArray[np.float32], index: tuple[slice, ...]) -> None:
    """Writes a part of a tensor's values to ``out``, contiguous and of its shape; reads the blocks that it lies in.

    Args:
        file: The open file.
        tensor: With one or two dimensions.
        out: Where the values go.
        index: The part, for each dimension.

    Raises:
        ConfigError: Its type is unknown or the file ends before it.
    """
    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(tensor.shape)
        raw = np.frombuffer(file.data(tensor, size // per_block * block_bytes), dtype=np.uint8)
        width = tensor.shape[-1]
        first, last, _ = index[-1].indices(width)
        # Those of a row's blocks that hold the columns.
        blocks = raw.reshape(-1, width // per_block, block_bytes)[:, first // per_block : -(-last // per_block)]
        if len(index) > 1:
            blocks = blocks[index[0]]
        cut = slice(first % per_block, first % per_block + last - first)
        rows = out.reshape(len(blocks), -1)
        step = max(_CHUNK // (blocks.shape[1] * per_block), 1)
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step].reshape(-1, block_bytes)
            into = rows[start : start + step]
            wide = (
                into
                if into.size == len(part) * per_block
                else np.empty((len(into), blocks.shape[1] * per_block), np.float32)
            )
            if kind == gguf.GGMLQuantizationType.Q8_0:
                _q8_0(part, wide)
            else:
                # One row, since gguf loops over rows in Python.
                wide[:] = gguf.dequantize(part.reshape(1, -1), kind).reshape(wide.shape)
            if wide is not into:
                into[:] = wide[:, cut]
    # NotImplementedError is what the gguf library raises for a type that it cannot widen.
    except (ValueError, KeyError, NotImplementedError, GgufError) as error:
        raise unreadable(file, tensor, error) from error


def unreadable(file: GgufFile, tensor: GgufTensor, error: Exception) -> ConfigError:
    """The error that a tensor cannot be read; names the file and the tensor."""
    path = file.paths[tensor.part]
    return ConfigError(f"{path}: tensor {tensor.name} (type {tensor.type}) cannot be read: {error}")


def _q8_0(blocks: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Dequantises blocks of a float16 scale and 32 int8 into ``out``; several times faster than ``gguf.dequantize``."""
    result = out.reshape(-1, _Q8_0_SIZE)
    result[:] = blocks[:, 2:].view(np.int8)
    result *= blocks[:, :2].copy().view(np.float16).astype(np.float32)


def type_name(tensor: GgufTensor) -> str:
    """Its type's name in the package ``gguf``; the number of one that it does not know."""
    try:
        return gguf.GGMLQuantizationType(tensor.type).name
    except ValueError:
        return str(tensor.type)


_MATRIX = 2
_ROW = ".shared_expert_gate.weight"
"""How the name of a matrix of one row ends, which files have without that dimension."""


class GgufSource:
    """Implements :class:`sapwood_worker.model.checkpoint.weights.WeightSource`.

    Args:
        file: The open file; it must stay open, but not for the blocks, which are a mapping of their own.
        config: Read from the same file.
        family: The model's family.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, family: ModelFamily) -> None:
        self._file = file
        self._config = config
        self._interleaved, self._names = family.gguf_interleaves, family.gguf_names
        self._mapped: dict[int, Tensor] = {}
        self._made = dict(made_tensors(file, config))
        used = {part.name for made in self._made.values() for part in made.parts}
        self._found = {
            ours: part
            for name, tensor in file.tensors.items()
            # Blocks after the model's are for drafts.
            if name not in used and name not in ROPE_TENSORS and (block_of(name) or 0) < config.num_layers
            for ours, part in self._parts(canonical(name, family.gguf_names), tensor, family.fused(config))
        }

    def _parts(self, name: str, tensor: GgufTensor, fused: FusedRows) -> Iterator[tuple[str, GgufTensor]]:
        """A tensor, or each expert's of it, or the rows of each of the projections that it holds."""
        if EACH in name:
            for expert in range(tensor.shape[0]):
                yield name.replace(EACH, str(expert)), expert_of(self._file, tensor, expert)
            return
        if name.endswith(_ROW) and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        for ours, place in places(name, self._file.path, tensor.name, fused):
            part = place.part(tensor.shape)
            if part is None:
                yield ours, tensor
                continue
            _, rows = part
            first = rows.start * math.prod(tensor.shape[1:])
            yield ours, slab(self._file, tensor, first, (rows.size, *tensor.shape[1:]))

    def tensors(self) -> dict[str, StoredTensor]:
        found = {
            name: StoredTensor(
                tensor.shape,
                type_name(tensor),
                blocks=partial(self._blocks, name) if len(tensor.shape) == _MATRIX else None,
            )
            for name, tensor in self._found.items()
        }
        return found | {name: StoredTensor(made.shape, made.dtype) for name, made in self._made.items()}

    def stored_name(self, name: str) -> str:
        return stored_name(name, self._names)

    def where(self, name: str) -> str:
        made, tensor = self._made.get(name), self._found.get(name)
        parts = made.parts if made is not None else [] if tensor is None else [tensor]
        if not parts:
            return str(self._file.path)
        return f"{self._file.paths[parts[0].part]}: {', '.join(part.name for part in parts)}"

    def read_into(self, name: str, slot: WeightSlot) -> None:
        if name in self._made:
            self._made[name].read_into(slot)
            return
        tensor, target = self._found[name], slot.target
        interleaved = self._is_interleaved(name)
        if target.dtype == torch.float32 and target.device.type == "cpu" and target.is_contiguous() and not interleaved:
            dequantize_into(self._file, tensor, target.numpy(), slot.index)
            return
        values = torch.empty(target.shape, dtype=torch.float32)
        dequantize_into(self._file, tensor, values.numpy(), slot.index)
        target.copy_(halves(values, self._config.head_dim) if interleaved else values)

    def _blocks(self, name: str) -> Tensor:
        tensor = self._found[name]
        rows, columns = tensor.shape
        try:
            per_block, block_bytes = block_size(self._file, tensor)
            width = columns // per_block * block_bytes
            end = tensor.offset + len(self._file.data(tensor, rows * width))
        except GgufError as error:
            raise unreadable(self._file, tensor, error) from error
        if tensor.part not in self._mapped:
            path = self._file.paths[tensor.part]
            # Pages of a private mapping are the file's own, shared by all who map it, as long as nobody writes to them.
            self._mapped[tensor.part] = torch.from_file(
                str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
            )
        blocks = self._mapped[tensor.part][tensor.offset : end].view(rows, width)
        return halves(blocks, self._config.head_dim) if self._is_interleaved(name) else blocks

    def _is_interleaved(self, name: str) -> bool:
        return self._interleaved and is_rotated(name)


# The order of rows of queries and keys, where ``ModelFamily.gguf_interleaves``.


def is_rotated(name: str) -> bool:
    """Whether the rows of a tensor, by its name in Hugging Face checkpoints, are those of queries or keys."""
    return ".q_proj." in name or ".k_proj." in name


def halves(rows: Tensor, head_dim: int) -> Tensor:
    """The rows of a file, whose pairs lie side by side [heads, D / 2, 2, ...], as first halves, then second halves."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of :func:`halves`."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# Reads a model's configuration from GGUF metadata.


def read_gguf_config(
    file: GgufFile, rope_tensors: Mapping[str, tuple[float, ...]] | None = None
) -> tuple[ModelFamily, ModelConfig]:
    """The family and the configuration of a GGUF model.

    Args:
        file: The open file.
        rope_tensors: The values of those of ``ROPE_TENSORS`` that it has.

    Raises:
        ConfigError: The architecture or something in it is not supported, or a key is missing; names the file.
    """
    name = file.metadata.get("general.architecture")
    known = {family.gguf_name or family.name: family for family in families() if family.from_gguf is not None}
    family = known.get(str(name))
    if family is None or family.from_gguf is None:
        raise ConfigError(f"{file.path}: architecture {name} is not supported (supported: {', '.join(known)})")
    values = GgufValues(file, str(name), rope_tensors or {})
    try:
        config = family.from_gguf(values)
        config = replace(config, architecture=family.name)
    except KeyError as error:
        raise ConfigError(f"{file.path}: {error.args[0]!r} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{file.path}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        last = values.reads.last
        raise ConfigError(
            f"{file.path}: {last} ({short(file.metadata.get(last))}) is not what such a setting can be: {error}"
        ) from error
    settings = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.") and key not in values.reads.names
    }
    if refused := GGUF.refused(settings):
        raise ConfigError(refusal(str(file.path), {values.named(key): value for key, value in refused.items()}))
    return family, config


# Tensors that Hugging Face checkpoints hold otherwise than GGUF files do: they are put together as they are read.


_MXFP4 = "MXFP4"
_STACKED = 3
"""Dimensions of a tensor that holds a matrix of each expert, or head."""
_PER_BLOCK = 32
"""Numbers of a block of MXFP4, which is a byte with their exponent and 16 bytes with a number in either half."""


class MadeTensor(ABC):
    """A tensor as the model wants it. Args: file: The open file; parts: The stored tensors that it is made of."""

    def __init__(self, file: GgufFile, parts: Sequence[GgufTensor]) -> None:
        self._file, self.parts = file, parts

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """What it holds, as ``StoredTensor`` has it."""

    @abstractmethod
    def read_into(self, slot: WeightSlot) -> None:
        """Writes the slot's part of the tensor into its target; ConfigError if it cannot be read."""


class JoinedMatrices(MadeTensor):
    """gpt-oss's experts: [E, N, K] each, in the file -> [E, K, P N], the rows of P projections in turns.

    Args:
        kind: The numbers; MXFP4's codes, uint8 [E, P N, K / 32, 16]; its exponents, [E, P N, K / 32]; or biases, [E, P N].
    """

    def __init__(
        self, file: GgufFile, parts: Sequence[GgufTensor], kind: Literal["numbers", "codes", "exponents", "biases"]
    ) -> None:
        super().__init__(file, parts)
        self._kind = kind

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, *columns = self.parts[0].shape
        rows *= len(self.parts)
        if self._kind == "biases":
            return experts, rows
        groups = columns[0] // _PER_BLOCK
        return {
            "numbers": (experts, columns[0], rows),
            "codes": (experts, rows, groups, _PER_BLOCK // 2),
            "exponents": (experts, rows, groups),
        }[self._kind]

    @property
    def dtype(self) -> str:
        return "U8" if self._kind in ("codes", "exponents") else type_name(self.parts[0])

    def read_into(self, slot: WeightSlot) -> None:
        target, (experts, *rest) = slot.target, slot.index
        for here, expert in enumerate(range(*experts.indices(self.shape[0]))):
            for at, part in enumerate(self.parts):
                # Numbers are transposed: their rows are the last dimension.
                taken = rest[1] if self._kind == "numbers" else rest[0]
                rows = slice(taken.start // len(self.parts), taken.stop // len(self.parts))
                own = target[here, :, at :: len(self.parts)].T if self._kind == "numbers" else None
                read = self._matrix(part, expert, rows, rest)
                (target[here, at :: len(self.parts)] if own is None else own).copy_(read)

    def _matrix(self, part: GgufTensor, expert: int, rows: slice, index: Sequence[slice]) -> Tensor:
        """An expert's of a projection: its own rows, and of them what the index, that of a slot without experts, asks for."""
        if self._kind == "biases":
            values: npt.NDArray[np.float32] = np.empty((1, rows.stop - rows.start), np.float32)
            dequantize_into(self._file, part, values, (slice(expert, expert + 1), rows))
            return torch.from_numpy(values[0])
        tensor = expert_of(self._file, part, expert)
        if self._kind == "numbers":
            columns = index[0]
            values = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
            dequantize_into(self._file, tensor, values, (rows, columns))
            return torch.from_numpy(values)
        codes, exponents = _mxfp4(self._file, tensor, rows, index[1])
        return torch.from_numpy(codes if self._kind == "codes" else exponents)


class LatentUp(MadeTensor):
    """The matrices that expand latent vectors: keys' [H, R, A] and values' [H, B, R] in the file -> [H (A + B), R], head after
    head."""

    @property
    def shape(self) -> tuple[int, ...]:
        heads, rank, keys = self.parts[0].shape
        return heads * (keys + self.parts[1].shape[1]), rank

    @property
    def dtype(self) -> str:
        return type_name(self.parts[0])

    def read_into(self, slot: WeightSlot) -> None:
        keys, values = self.parts
        _, rank, size = keys.shape
        each = size + values.shape[1]
        rows, columns = slot.index
        for head in range(rows.start // each, rows.stop // each):
            place = slot.target[head * each - rows.start : (head + 1) * each - rows.start]
            transposed = np.empty((rank, size), np.float32)
            dequantize_into(self._file, expert_of(self._file, keys, head), transposed, (slice(None), slice(None)))
            below = np.empty((values.shape[1], rank), np.float32)
            dequantize_into(self._file, expert_of(self._file, values, head), below, (slice(None), slice(None)))
            place.copy_(torch.from_numpy(np.concatenate((transposed.T, below)))[:, columns])


def made_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, MadeTensor]]:
    """All such tensors of a model, by Sapwood's names; a missing part is reported by the loader.

    Raises:
        ConfigError: The shapes of what makes up a tensor do not fit together; names the file and its parts.
    """
    tensors = file.tensors
    for layer in range(config.num_layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        up = _all(tensors, f"{theirs}.attn_k_b.weight", f"{theirs}.attn_v_b.weight")
        if config.latent is not None and up:
            keys, values = (part.shape for part in up)
            if not len(keys) == len(values) == _STACKED or (keys[0], keys[1]) != (values[0], values[2]):
                raise _unfit(file, up)
            yield f"{ours}.self_attn.kv_b_proj.weight", LatentUp(file, up)
        if config.sparse is None or config.sparse.joined is None:
            continue
        for name, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            stem = f"{ours}.mlp.experts.{name}"
            matrices = _all(tensors, *(f"{theirs}.ffn_{kind}_exps.weight" for kind in kinds))
            biases = _all(tensors, *(f"{theirs}.ffn_{kind}_exps.bias" for kind in kinds))
            for parts, dims in ((matrices, _STACKED), (biases, _STACKED - 1)):
                if any(len(part.shape) != dims or part.shape != parts[0].shape for part in parts):
                    raise _unfit(file, parts)
            if biases:
                yield f"{stem}_bias", JoinedMatrices(file, biases, "biases")
            if not matrices:
                continue
            if _stay(tensors, theirs):
                yield f"{stem}_blocks", JoinedMatrices(file, matrices, "codes")
                yield f"{stem}_scales", JoinedMatrices(file, matrices, "exponents")
            else:
                yield stem, JoinedMatrices(file, matrices, "numbers")


def _stay(tensors: Mapping[str, GgufTensor], layer: str) -> bool:
    """Whether all of a layer's experts are in MXFP4."""
    found = (tensors.get(f"{layer}.ffn_{kind}_exps.weight") for kind in ("gate", "up", "down"))
    return all(tensor is not None and type_name(tensor) == _MXFP4 for tensor in found)


def _all(tensors: Mapping[str, GgufTensor], *names: str) -> list[GgufTensor]:
    """The tensors of these names; none if one is missing."""
    return [tensors[name] for name in names] if all(name in tensors for name in names) else []


def _unfit(file: GgufFile, parts: Sequence[GgufTensor]) -> ConfigError:
    shapes = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
    return unreadable(file, parts[0], ValueError(f"these shapes do not fit together: {shapes}"))


def _mxfp4(
    file: GgufFile, tensor: GgufTensor, rows: slice, groups: slice
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """A part of a matrix: its codes, [N, groups, 16] with neighbours in a byte, and its exponents, [N, groups].

    The file has a block's first 16 numbers in the low halves of its bytes and the others in the high ones.
    """
    per_block, block_bytes = block_size(file, tensor)
    count, columns = tensor.shape
    try:
        raw = np.frombuffer(file.data(tensor, count * columns // per_block * block_bytes), dtype=np.uint8)
    except GgufError as error:
        raise unreadable(file, tensor, error) from error
    blocks = raw.reshape(count, columns // per_block, block_bytes)[rows, groups]
    halves = blocks[..., 1:]
    codes = np.concatenate((halves & 15, halves >> 4), -1)
    return codes[..., ::2] | codes[..., 1::2] << 4, np.ascontiguousarray(blocks[..., 0])
