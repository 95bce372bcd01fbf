"""The weights of a checkpoint, and where each part of them goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_worker.model.families.family import FusedRows
from sapwood_worker.model.weight_slot import Span, StoredTensor, WeightSlot, WeightSlots, why_no_numbers

# Where a checkpoint keeps one of our tensors: in a stored tensor, or in rows of one that holds several.


BLOCK = 128
"""Rows, and columns, of a weight that share a scale where scales are for blocks."""

# The suffixes after a layer's name: of GPTQ and AWQ, compressed-tensors, and float8.
_BY_COLUMNS = ("qweight", "qzeros", "scales")
_PACKED = ("qweight", "qzeros", "weight_zero_point")
_SCALES = ("weight_scale", "weight_scale_inv")
_SHARED = ("g_idx", "weight_g_idx", "weight_shape")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file.

    Attributes:
        path: The file.
        stored: The tensor's name there.
        rows: Which outputs of the projections that it holds; None: it is a tensor of its own.
        by_rows: Whether outputs come before inputs in tensors of all experts.
        groups: In how many equal parts of the stored outputs ours lie, each at the same place of its part.
        transposed: Whether a matrix is stored as [inputs, outputs].
    """

    path: Path
    stored: str
    rows: Span | None = None
    by_rows: bool = False
    groups: int = 1
    transposed: bool = False

    @property
    def rearranged(self) -> bool:
        """Whether :meth:`take` has to put it together from the whole tensor."""
        return self.transposed or (self.groups > 1 and self.rows is not None)

    def take(self, whole: Tensor) -> Tensor:
        """Ours of a whole stored tensor, as [outputs, inputs] or [outputs].

        Raises:
            ConfigError: It has another number of outputs than the projections that it should hold.
        """
        if self.transposed and whole.dim() == _MATRIX:
            whole = whole.T
        if self.rows is None:
            return whole
        if len(whole) != self.rows.total:
            raise self._misfit(whole.shape)
        each = whole.view(self.groups, -1, *whole.shape[1:]) if self.groups > 1 else whole[None]
        start = self.rows.start // self.groups
        return each[:, start : start + self.rows.size // self.groups].flatten(0, 1)

    def _misfit(self, shape: Sequence[int]) -> ConfigError:
        assert self.rows is not None
        return ConfigError(
            f"{self.path}: tensor {self.stored} has shape {list(shape)}, "
            f"which does not hold the {self.rows.total} rows that the configuration asks for"
        )

    def part(self, shape: Sequence[int]) -> tuple[int, Span] | None:
        """The dimension along which the stored tensor is cut, and this rank's range; None: the whole tensor.

        That depends on the format, for weights, biases, scales and zeros alike: in some outputs are columns, in some a word holds
        several outputs.

        Raises:
            ConfigError: It has another number of outputs than the projections that it should hold.
        """
        rows, kind = self.rows, self.stored.rpartition(".")[2]
        if rows is None or kind in _SHARED or not shape or shape[0] == 1:
            return None
        dim = 1 if kind in _BY_COLUMNS else 0
        if len(shape) == 3 and shape[1] > 1:  # of all experts
            dim = 1 if self.by_rows else 2
        count = shape[dim] if len(shape) > dim else 0
        if count == rows.total:
            return dim, rows
        each = _outputs_each(kind, count, rows.total)
        if each and rows.start % each == 0 and (rows.size % each == 0 or rows.start + rows.size == rows.total):
            return dim, Span(rows.start // each, -(-rows.size // each), count)
        raise self._misfit(shape)


def _outputs_each(kind: str, count: int, total: int) -> int:
    """How many outputs an entry stands for; 0: they do not fit."""
    if kind in _PACKED:
        each = total // max(count, 1)
        return each if each in (4, 8) and each * count == total else 0
    return BLOCK if kind in _SCALES and count == -(-total // BLOCK) else 0


def places(
    name: str,
    path: Path,
    stored: str,
    fused: FusedRows,
    *,
    by_rows: bool = False,
    groups: int = 1,
    transposed: bool = False,
) -> Iterator[tuple[str, Place]]:
    """Our names of what a stored tensor holds, each with its place.

    Args:
        name: Our name of the whole.
        path: The file.
        stored: The tensor's name there.
        fused: Projections that are stored as one tensor.
        by_rows: As :class:`Place` has it.
        groups: The same.
        transposed: The same, of matrices of layers.
    """
    transposed = transposed and name.startswith("model.layers.")
    name += "."
    whole = next((each for each in fused if f".{each}." in name), None)
    if whole is None:
        yield name[:-1], Place(path, stored, transposed=transposed)
        return
    start, total = 0, sum(fused[whole].values())
    for part, size in fused[whole].items():
        place = Place(path, stored, Span(start, size, total), by_rows, groups, transposed)
        yield name.replace(f".{whole}.", f".{part}.")[:-1], place
        start += size


_MATRIX = 2
_DUMMY_STD = 0.02
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of slots that take numbers unchanged; slots of other dtypes belong to a quantised format."""


class WeightSource(Protocol):
    """The tensors of a checkpoint under their Hugging Face names."""

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor that is part of the language model, by its name."""
        ...

    def where(self, name: str) -> str:
        """The file a tensor lies in, with its name there, for error messages."""
        ...

    def stored_name(self, name: str) -> str:
        """The file's name of a tensor, even if the file does not have it."""
        ...

    def read_into(self, name: str, slot: WeightSlot) -> None:
        """Writes the slot's part of a tensor into its target, converted to its dtype; reads no more than that.

        May run in several threads at once.

        Raises:
            ConfigError: It cannot be read.
        """
        ...


def load_weights(
    slots: WeightSlots,
    source: WeightSource,
    norm_offset: float,
    threads: int,
    elsewhere: tuple[str, ...] = (),
    *,
    inside: str = "",
    stored: Mapping[str, StoredTensor] | None = None,
) -> None:
    """Fills every slot.

    Args:
        slots: The tensors to fill; mutated.
        source: The checkpoint.
        norm_offset: Added to norm weights as they are stored.
        threads: Tensors read at once.
        elsewhere: How names of tensors begin that other ranks read, or that were read before.
        inside: How names of all tensors begin that are to be read now.
        stored: What ``source.tensors()`` gave; None: it is asked.

    Raises:
        ConfigError: A tensor is missing, unexpected, of another shape or of a type whose numbers mean nothing alone; names it and
            the file.
    """
    stored = source.tensors() if stored is None else stored
    missing = slots.keys() - stored.keys()
    if missing:
        raise ConfigError(f"{source.where('')}: {_list({source.stored_name(name) for name in missing})} missing")
    unexpected = {name for name, each in stored.items() if name.startswith(inside) and not each.scales} - slots.keys()
    unexpected = {name for name in unexpected if not name.startswith(elsewhere)}
    if unexpected:
        raise ConfigError(
            f"{source.where(min(unexpected))}: {_list(unexpected)} unexpected: the model has no such weight"
        )
    for name, slot in slots.items():
        if stored[name].shape != slot.shape:
            raise ConfigError(
                f"{source.where(name)}: tensor {name} has shape {list(stored[name].shape)}, "
                f"the configuration asks for {list(slot.shape)}"
            )
        if slot.target.dtype in _NUMBERS and (why := why_no_numbers(name, stored)):
            raise ConfigError(f"{source.where(name)}: tensor {name} ({stored[name].dtype}): {why}")

    def read(name: str) -> None:
        slot = slots[name]
        # Each thread has an inference mode of its own.
        with torch.inference_mode():
            source.read_into(name, slot)
            if slot.norm and norm_offset:
                slot.target.add_(norm_offset)

    # The largest first, so that no thread ends with one while the others idle.
    order = sorted((name for name in slots if not slots[name].filled), key=lambda name: -slots[name].target.numel())
    _run_all(read, order, threads)


def fill_dummy_weights(slots: WeightSlots, seed: int) -> None:
    """Fills every slot with random numbers: the same for the same seed and device kind. Mutates the slots.

    Norms are 1. Numbers in float8 are as much larger as their scales, which are all alike, are less than 1.
    """
    with torch.inference_mode():
        for name in sorted(slots):
            slot = slots[name]
            if slot.norm:
                slot.target.fill_(1.0)
                continue
            if name.endswith(".weight_scale_inv"):
                slot.target.fill_(_DUMMY_STD)
                continue
            generator = torch.Generator(slot.target.device)
            generator.manual_seed(seed)
            seed += 1
            if slot.target.dtype == torch.float8_e4m3fn:
                numbers = torch.empty(slot.target.shape, dtype=torch.bfloat16, device=slot.target.device)
                slot.target.copy_(numbers.normal_(generator=generator))
            else:
                slot.target.normal_(0.0, _DUMMY_STD, generator=generator)


def _run_all(work: Callable[[str], None], items: Iterable[str], threads: int) -> None:
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="load") as executor:
        for _ in executor.map(work, items):
            pass


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
    return f"tensor {shown} is" if len(ordered) == 1 else f"tensors {shown} are"
