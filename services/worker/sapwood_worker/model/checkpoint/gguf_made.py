"""Tensors that Hugging Face checkpoints hold otherwise than GGUF files do: they are put together as they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile, GgufTensor
from sapwood_worker.model.checkpoint.gguf_numbers import block_size, dequantize_into, expert_of, type_name, unreadable
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.weight_slot import WeightSlot

_MXFP4 = "MXFP4"
_STACKED = 3
"""Dimensions of a tensor that holds a matrix of each expert, or head."""
_PER_BLOCK = 32
"""Numbers of a block of MXFP4, which is a byte with their exponent and 16 bytes with a number in either half."""


class MadeTensor(ABC):
    """One of our tensors. Args: file: The open file; parts: What it is made of."""

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
        """Writes the slot's part of it into its target; ConfigError if it cannot be read."""


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
    """What expands latent vectors: keys' [H, R, A] and values' [H, B, R] in the file -> [H (A + B), R], head after head."""

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
    """All such tensors of a model, each with our name of it; what is missing of one is left for who loads it to name.

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
