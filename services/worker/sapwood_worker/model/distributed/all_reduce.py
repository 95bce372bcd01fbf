"""How a group of ranks sums tensors: by one of several methods, whichever is quickest for a size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sapwood_worker.records.model_info import SumChoices, SumTime


class SumMethod(Protocol):
    """Sums tensors over the ranks of a group, which all make the same calls in the same order.

    Attributes:
        name: One of :data:`~sapwood_worker.records.model_info.SUM_METHODS`.
        most_bytes: Bytes of the largest tensor that it takes; infinity: any.
    """

    @property
    def name(self) -> str: ...

    @property
    def most_bytes(self) -> float: ...

    def sum(self, x: Tensor) -> None:
        """Sums x over the ranks, in place."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors in their order, [size, ...]."""
        ...

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks: [size * T, ...] -> [T, ...]."""
        ...

    def replayed(self) -> int | None:
        """How often the device has run it, in CUDA graphs too; waits for it. None: nobody but the caller counts."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What sums tensors of a size.

    Attributes:
        most_bytes: The largest tensors that it is for.
        method: The method.
    """

    most_bytes: float
    method: SumMethod


class AllReduce:
    """Sums tensors by what was chosen for their size.

    Args:
        choices: By size, ascending; the last takes tensors of any size.
        times: The seconds by which they were chosen.

    Attributes:
        report: What is chosen, for operators.
    """

    def __init__(self, choices: Sequence[Choice], times: Sequence[SumTime] = ()) -> None:
        assert choices[-1].most_bytes == math.inf, "the last takes tensors of any size"
        self._choices = choices
        *smaller, last = choices
        words = [f"{each.method.name} up to {each.most_bytes / 1024:.0f} KiB" for each in smaller]
        words.append(f"{last.method.name} above" if smaller else last.method.name)
        self.report = SumChoices(", ".join(words), tuple(times))
        self._calls: Counter[str] = Counter()

    def method(self, num_bytes: int) -> SumMethod:
        """What sums tensors of so many bytes. O(choices)."""
        return next(each.method for each in self._choices if num_bytes <= each.most_bytes)

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

    def counts(self) -> dict[str, int]:
        """How often each method has been called, by its name; of the backend, calls in CUDA graphs count as they are captured."""
        methods = {each.method.name: each.method for each in self._choices}
        found = {name: method.replayed() for name, method in methods.items()}
        return {name: self._calls[name] if count is None else count for name, count in found.items()}


def add_up(parts: Sequence[Tensor], result: Tensor) -> None:
    """Writes the sum of the parts in their order, in float32 if they have fewer bits, rounded once: what methods give."""
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
