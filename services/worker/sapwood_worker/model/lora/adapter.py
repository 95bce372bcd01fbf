"""An adapter as its files hold it: pairs of low-rank matrices by the modules that they are for."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.telemetry.shown_text import cut

FIELD = "lora_path"
"""The field of a request that names an adapter's files."""
_MOST_SHOWN = 1024
"""Characters of an error, which may have names that files gave."""


def refused(where: Path | str, why: str) -> InvalidArgumentError:
    """The error that an adapter cannot be served."""
    return InvalidArgumentError(f"{where}: {cut(why, _MOST_SHOWN)}", field=FIELD)


@dataclass(frozen=True, slots=True)
class Pair:
    """What an adapter adds to a module's weight: ``scale * b @ a``.

    Attributes:
        a: [r, inputs].
        b: [outputs, r].
        scale: The factor.
        tensors: The names of both in the file, for error messages.
    """

    a: Tensor
    b: Tensor
    scale: float
    tensors: tuple[str, str]

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read.

    Attributes:
        where: The file with its matrices, for error messages.
        digest: A hash of the bytes that were read.
        pairs: By the module's name in a Hugging Face checkpoint: ``model.layers.0.self_attn.q_proj``.
        wanted: Modules that the configuration says are adapted; the model's own among them must have pairs. Matches the ends of
            names. Empty: it does not say.
        layers: The layers that ``wanted`` is about; None: all.
        excluded: Ends of names of modules that ``wanted`` is not about.
    """

    where: str
    digest: bytes
    pairs: Mapping[str, Pair]
    wanted: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """What an adapter may be.

    Attributes:
        rank: The largest rank.
        modules: The sizes of modules that can be adapted by name: outputs and inputs. Others are refused by name before memory
            is taken.
        elsewhere: How names of modules begin that other ranks have; their sizes are not known here.
        refused: Names (or their ends) of modules that no adapter may be for, and why.
    """

    rank: int
    modules: Mapping[str, tuple[int, int]]
    elsewhere: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def check_module(self, where: Path, tensor: str, module: str) -> None:
        """Raises InvalidArgumentError if adapters for a module are not served; names tensor and module."""
        if module in self.modules or module.startswith(self.elsewhere):
            return
        why = next((why for end, why in self.refused.items() if end in module), "")
        if why:
            raise refused(where, f"tensor {tensor}: adapters of {module} are not served: {why}")
        raise refused(where, f"tensor {tensor}: the model has no linear module {module}")

    def check_shape(self, where: Path, tensor: str, module: str, shape: tuple[int, ...], *, second: bool) -> None:
        """Raises InvalidArgumentError if a matrix does not fit its module.

        Args:
            where: The file.
            tensor: The matrix's name there.
            module: The module's name.
            shape: The matrix's.
            second: Whether it is B, [outputs, r]; else A, [r, inputs].
        """
        rank = shape[1 if second else 0] if len(shape) == 2 else 0
        sizes = self.modules.get(module)
        fits = len(shape) == 2 and (sizes is None or shape[0 if second else 1] == sizes[0 if second else 1])
        if not fits or min(shape) < 1:
            wanted = "two dimensions" if sizes is None else f"[{sizes[0]}, rank]" if second else f"[rank, {sizes[1]}]"
            raise refused(where, f"tensor {tensor} has shape {list(shape)}; {module} takes {wanted}")
        if rank > self.rank:
            raise refused(
                where,
                f"tensor {tensor} of {module} has rank {rank}; this worker takes at most {self.rank}: start it with "
                f"--lora-slots SLOTS,rank={rank}",
            )


def read_bytes(path: Path, most: int, first: int | None = None) -> bytearray:
    """The bytes of a regular file, or its first ones.

    Args:
        path: The file.
        most: The largest size that is read.
        first: How many bytes to read; None: all.

    Raises:
        InvalidArgumentError: There is no such file, it is no regular file, or it is larger; names it.
    """
    try:
        # A pipe must not keep us waiting, nor a device give bytes without end.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as content:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise refused(path, "is no file")
            if status.st_size > most:
                raise refused(path, f"has {status.st_size} bytes; an adapter of this model has at most {most}")
            found = bytearray(status.st_size if first is None else min(first, status.st_size))
            del found[content.readinto(found) :]
            return found
    except OSError as error:
        raise refused(path, f"cannot be read: {error.strerror or error}") from error


def assert_finite(where: Path | str, module: str, pair: Pair) -> None:
    """Raises InvalidArgumentError if a matrix has numbers that are not finite."""
    for name, matrix in zip(pair.tensors, (pair.a, pair.b), strict=True):
        if not bool(torch.isfinite(matrix).all()):
            raise refused(where, f"tensor {name} of {module} has numbers that are not finite")
