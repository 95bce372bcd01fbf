"""A checkpoint's tensors and the places that they are loaded into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

_CODES = ("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
"""Types, as safetensors files name them, of numbers that mean nothing without a format, and of those that need scales."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a dimension: ``start`` .. ``start + size - 1`` of ``total``."""

    start: int
    size: int
    total: int

    @property
    def slice(self) -> slice:
        """The part as an index."""
        return slice(self.start, self.start + self.size)


def whole(size: int) -> Span:
    """All of a dimension."""
    return Span(0, size, size)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A tensor to be filled from a checkpoint.

    Attributes:
        target: A parameter or the part of a fused one; written in place.
        norm: Whether it is a norm's weight: dummy weights are 1, and 1 is added if the file stores the w of 1 + w.
        spans: Which part of the checkpoint's tensor it takes, for each dimension; None: all of it.
        filled: Whether the target is that part as the checkpoint stores it, so that nothing is read.
    """

    target: Tensor
    norm: bool = False
    spans: tuple[Span, ...] | None = None
    filled: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return tuple(self.target.shape) if self.spans is None else tuple(span.total for span in self.spans)

    @property
    def is_part(self) -> bool:
        """Whether it takes less than the whole tensor."""
        return self.shape != tuple(self.target.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """Which part of the checkpoint's tensor it takes."""
        spans = self.spans or tuple(whole(size) for size in self.target.shape)
        return tuple(span.slice for span in spans)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a checkpoint stores it.

    Attributes:
        shape: Its shape.
        dtype: Its type by the file format's own name: ``F8_E4M3``, ``Q4_K``.
        scales: Whether it holds the scales of another tensor. If no slot asks for the scales, they are read together with that
            tensor.
        blocks: Returns the bytes of its rows, uint8 [rows, bytes], in Hugging Face's order. The bytes may be mapped from the
            file, so do not change them. None: read its numbers instead.
    """

    shape: tuple[int, ...]
    dtype: str
    scales: bool = False
    blocks: Callable[[], Tensor] | None = None


def why_no_numbers(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """Why a tensor cannot be read as plain numbers; empty: it can.

    Args:
        name: The tensor's.
        stored: All that the checkpoint stores, and this.
    """
    found = stored[name]
    if found.dtype in _CODES:
        return "weights of this kind cannot be read"
    if found.dtype in _FLOAT8 and not found.scales and not {f"{name}_scale", f"{name}_scale_inv"} & stored.keys():
        return "its scales are missing"
    return ""


WeightSlots = dict[str, WeightSlot]
"""Hugging Face tensor name -> slot."""
