"""Weights in torch's own format (``pytorch_model.bin``), as files of before 2023 have them, read as safetensors are.

The file is a pickle. torch's restricted unpickler reads it, which makes tensors of it and runs nothing; what else the pickle asks
for is refused. So are tensors that are not dense numbers, or that show one number at many places: the shape of such a tensor
says nothing about the file's size. Tensors stay in the memory map until they are read. Files of before torch 1.6 cannot be
mapped and are read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""A dtype's name in safetensors files."""


class TorchSlice:
    """A stored tensor whose parts can be read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its dtype by the name that safetensors files have for it."""
        return _NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._tensor[index]
        return part


class TorchFile:
    """A file's tensors by their names; has the methods of ``safetensors.safe_open`` that are used here.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, or holds other things than tensors by their names; names it.
    """

    def __init__(self, path: Path) -> None:
        try:
            found = _load(path)
        except Exception as error:  # torch's own, and any that a damaged pickle leads to
            raise ConfigError(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from error
        if not isinstance(found, Mapping) or not all(
            isinstance(name, str) and isinstance(each, Tensor) for name, each in found.items()
        ):
            raise ConfigError(f"{path}: holds other things than tensors by their names")
        self._tensors = {name: _plain(path, name, each) for name, each in found.items()}

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def keys(self) -> list[str]:
        """The tensors' names."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor; do not change it."""
        return self._tensors[name]

    def get_slice(self, name: str) -> TorchSlice:
        """A tensor whose parts are to be read."""
        return TorchSlice(self._tensors[name])


def _plain(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor, without gradients. Raises ConfigError if it is of a kind that no weight is."""
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if not is_dense or tensor.is_quantized or tensor.dtype not in _NAMES:
        raise ConfigError(f"{path}: tensor {name} is no dense tensor of numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ConfigError(f"{path}: tensor {name} {list(tensor.shape)}: the file has fewer numbers for it")
    return tensor.detach()


def _load(path: Path) -> object:
    try:
        return torch.load(path, "cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(path, "cpu", weights_only=True)
