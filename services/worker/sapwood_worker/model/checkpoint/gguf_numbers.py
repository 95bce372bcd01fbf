"""The numbers of a GGUF file's tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import numpy as np
import numpy.typing as npt

from sapwood_common.errors import ConfigError
from sapwood_common.models.gguf_file import GgufError, GgufFile, GgufTensor

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
