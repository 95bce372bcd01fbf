"""The all-reduce of a group of ranks: several methods, and the choice of the quickest for each size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from sapwood_kernels.ops.contracts import Norm
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.records.model_info import APART, SumChoices, SumTime


class _Method(Protocol):
    """Sums tensors over the ranks of a group. All ranks make the same calls in the same order.

    Attributes:
        name: One of :data:`~sapwood_worker.records.model_info.SUM_METHODS`.
        most_bytes: The size of the largest tensor that it takes; infinity: any size.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_bytes(self) -> float: ...

    def replayed(self) -> int | None:
        """How often the device has run it, including in CUDA graphs; waits for the stream. None: only the caller counts."""
        ...


class SumMethod(_Method, Protocol):
    """Sums tensors."""

    def sum(self, x: Tensor) -> None:
        """Sums x over the ranks, in place."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors in their order, [size, ...]."""
        ...

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks: [size * T, ...] -> [T, ...]."""
        ...


class NormedMethod(_Method, Protocol):
    """Sums a tensor, adds the sum to a residual, and norms the residual."""

    def takes(self, x: Tensor, residual: Tensor) -> bool:
        """Whether it takes tensors of this kind and size."""
        ...

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        """Adds the sum of x over the ranks to the residual, in place; may overwrite x.

        Args:
            x: [T, N].
            residual: [T, N].
            norm: Of rows of N.

        Returns:
            [T, N]: the normed residual; None: the caller must compute the norm.
        """
        ...


MethodT = TypeVar("MethodT", bound=_Method)


@dataclass(frozen=True, slots=True)
class Choice(Generic[MethodT]):
    """The method for tensors up to a size.

    Attributes:
        most_bytes: The size of the largest tensors that it is for.
        method: The method.
    """

    most_bytes: float
    method: MethodT


class AllReduce:
    """Sums tensors with the method chosen for their size.

    Args:
        choices: By size, ascending; the last takes tensors of any size.
        times: The measured seconds behind the choice. refused: Methods that are not used because their trial failed, and the
        faults.

    Attributes:
        report: The chosen methods, for operators.
    """

    def __init__(
        self,
        choices: Sequence[Choice[SumMethod]],
        times: Sequence[SumTime] = (),
        refused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        assert choices[-1].most_bytes == math.inf, "the last takes tensors of any size"
        self._choices = choices
        self._normed: Sequence[Choice[NormedMethod]] = ()
        self.report = SumChoices(_words(choices), tuple(times), tuple(refused.items()))
        self._calls: Counter[str] = Counter()

    def choose_normed(self, choices: Sequence[Choice[NormedMethod]], times: Sequence[SumTime]) -> None:
        """Sets the methods for sums that a residual and a norm follow.

        Args:
            choices: As for sums alone.
            times: The seconds by which they were chosen.
        """
        self._normed = choices
        words = f"{self.report.words}; with residual and norm {_words(choices)}"
        self.report = replace(self.report, words=words, times=(*self.report.times, *times))

    def refuse(self, name: str, why: str) -> None:
        """Notes a method that is not used because its trial failed, and why."""
        self.report = replace(self.report, refused=(*self.report.refused, (name, why)))

    def note(self, name: str) -> None:
        """Counts a sum that was computed by calling a method directly."""
        self._calls[name] += 1

    def method(self, num_bytes: int) -> SumMethod:
        """The all-reduce for tensors of this many bytes. O(choices)."""
        return _of(self._choices, num_bytes)

    def __call__(self, x: Tensor) -> None:
        """Sums x over the ranks, in place."""
        method = self.method(x.nbytes)
        self._calls[method.name] += 1
        method.sum(x)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks: [size * T, ...] -> [T, ...]."""
        method = self.method(x.nbytes)
        self._calls[method.name] += 1
        return method.scatter_sum(x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        """Adds the sum of x over the ranks to the residual, as :meth:`NormedMethod.add` does."""
        if self._normed:
            method = _of(self._normed, x.nbytes)
            if method.takes(x, residual):
                self._calls[method.name] += 1
                return method.add(x, residual, norm)
        self(x)
        residual += x
        return None

    def counts(self) -> dict[str, int]:
        """How often each method has been called, by name. The backend's calls in CUDA graphs count once, at capture."""
        methods: dict[str, _Method] = {each.method.name: each.method for each in self._choices}
        # The sums of what sums apart are counted.
        methods |= {each.method.name: each.method for each in self._normed if each.method.name != APART}
        found = {name: method.replayed() for name, method in methods.items()}
        return {name: self._calls[name] if count is None else count for name, count in found.items()}


class Apart:
    """A sum, followed by a separate addition and norm. Implements :class:`NormedMethod`.

    Args:
        sums: Sums.
        ops: Adds and norms.
    """

    name = APART
    most_bytes = math.inf

    def __init__(self, sums: Callable[[Tensor], None], ops: DeviceOps) -> None:
        self._sums, self._ops = sums, ops

    def takes(self, x: Tensor, residual: Tensor) -> bool:
        return True

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor | None:
        self._sums(x)
        return self._ops.add_normed(x, residual, norm)

    def replayed(self) -> int | None:
        return None


def _of(choices: Sequence[Choice[MethodT]], num_bytes: int) -> MethodT:
    return next(each.method for each in choices if num_bytes <= each.most_bytes)


def _words(choices: Sequence[Choice[MethodT]]) -> str:
    *smaller, last = choices
    words = [f"{each.method.name} up to {each.most_bytes / 1024:.0f} KiB" for each in smaller]
    return ", ".join([*words, f"{last.method.name} above" if smaller else last.method.name])


def add_up(parts: Sequence[Tensor], result: Tensor) -> None:
    """Writes the sum of the parts in their order, in float32 if they have fewer bits, rounded once: the result that every method
    must give."""
    first, *others = parts
    if result.dtype not in (torch.bfloat16, torch.float16):
        result.copy_(first)
        for part in others:
            result += part
        return
    total = first.float()
    for part in others:
        total += part
    result.copy_(total)
