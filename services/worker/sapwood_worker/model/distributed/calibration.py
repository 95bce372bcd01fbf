"""Chooses the all-reduce method for each size. All ranks together time the methods whose sums are exact on this machine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.all_reduce import (
    AllReduce,
    Apart,
    Choice,
    MethodT,
    NormedMethod,
    SumMethod,
    add_up,
)
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.records.model_info import SUM_SIZES, SumTime

logger = logging.getLogger(__name__)


# Test tensors for all-reduce methods: each reports what was wrong.


_COUNTS = (1, 1000, 100_003)
WIDTH = 4096
"""The one row width of normed test tensors; one only, since a kernel is compiled for each width."""
_ROWS = (1, 5, 70)
_EPS = 1e-6


class Case(Protocol):
    """A tensor for a method.

    Attributes:
        x: What the method sums; to be filled before each run.
    """

    x: Tensor

    def run(self) -> None:
        """Sums it."""
        ...

    def wrong(self, every: Tensor) -> str:
        """The faults of the last run, given all ranks' tensors, [size, ...]; empty: none."""
        ...


class TrialNorm:
    """A norm like those in a model's layers.

    Args:
        width: Numbers that are normed together.
        ops: The device's operations.
        dtype: Theirs.
    """

    eps = _EPS

    def __init__(self, width: int, ops: DeviceOps, dtype: torch.dtype) -> None:
        self.weight = torch.linspace(0.5, 1.5, width, device=ops.device)
        self._norm = ops.rms_norm(self.weight, self.eps, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x)


class _SumCase:
    def __init__(self, method: SumMethod, count: int, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self.x = torch.empty(count, dtype=dtype, device=device)
        self._method, self._rank = method, rank
        self._every = self._own = torch.empty(0)

    def run(self) -> None:
        self._every = self._method.gather(self.x)
        self._own = self._method.scatter_sum((self._rank + 1) * self._every)[0]
        self._method.sum(self.x)

    def wrong(self, every: Tensor) -> str:
        own, whole = torch.empty_like(self.x), torch.empty_like(self.x)
        add_up([(rank + 1) * every[self._rank] for rank in range(len(every))], own)
        add_up(every.unbind(), whole)
        found = {"gathering": (self._every, every), "sum of own rows": (self._own, own), "sum": (self.x, whole)}
        return next((name for name, (ours, right) in found.items() if not torch.equal(ours, right)), "")


class _NormedCase:
    def __init__(self, method: NormedMethod, shape: tuple[int, int], dtype: torch.dtype, ops: DeviceOps) -> None:
        self._matrix = torch.empty(shape, dtype=dtype, device=ops.device)
        self.x = self._matrix.view(-1)
        self._before = torch.linspace(-2, 2, len(self.x), device=ops.device).view(shape).to(dtype)
        self._residual = torch.empty_like(self._before)
        self._normed: Tensor | None = None
        self._method, self._norm = method, TrialNorm(shape[1], ops, dtype)

    @property
    def taken(self) -> bool:
        """Whether the method takes it."""
        return self._method.takes(self._matrix, self._residual)

    def run(self) -> None:
        self._residual.copy_(self._before)
        self._normed = self._method.add(self._matrix, self._residual, self._norm)

    def wrong(self, every: Tensor) -> str:
        summed = torch.empty_like(self.x)
        add_up(every.unbind(), summed)
        expected = self._before + summed.view_as(self._before)
        if not torch.equal(self._residual, expected):
            return "sum with a residual"
        most = 2 * torch.finfo(summed.dtype).eps  # means may be added up in another order
        right = self._normed is not None and torch.allclose(
            self._normed.float(), self._norm(expected).float(), rtol=most, atol=most
        )
        return "" if right else "norm"


def sum_cases(method: SumMethod, dtype: torch.dtype, ops: DeviceOps, group: Group) -> Iterator[Case]:
    """Tensors of several sizes that a method takes."""
    for count in _COUNTS:
        if group.size * count * dtype.itemsize <= method.most_bytes:
            yield _SumCase(method, count, dtype, ops.device, group.rank)


def normed_cases(method: NormedMethod, dtype: torch.dtype, ops: DeviceOps, group: Group) -> Iterator[Case]:
    """Tensors of several sizes for a method that also adds a residual and norms."""
    cases = (_NormedCase(method, (rows, WIDTH), dtype, ops) for rows in _ROWS)
    yield from (case for case in cases if case.taken)


_ROUNDS = 4
_CALLS = 3
_CLEARLY = 0.9
"""A method replaces another only if its seconds are at most this share of the other's."""

Timer = Callable[[Callable[[], None]], float]
"""Seconds of one call, of several."""
Replay = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes a function that repeats a call as a model's steps do: if steps are CUDA graphs, it replays a graph of the call."""


class Trial:
    """Tries methods; called by all ranks together.

    Args:
        group: The ranks. Sums are compared with the sum of their ``all_gather``.
        ops: The operations of the device where the tensors are.
        dtypes: Of the tensors that are tried; the first is timed.
        timer: Measures a call.
        replay: Turns a call into the form in which the model runs it.
    """

    def __init__(
        self, group: Group, ops: DeviceOps, dtypes: Sequence[torch.dtype], *, timer: Timer, replay: Replay
    ) -> None:
        self._group, self._ops, self._dtypes = group, ops, dtypes
        self._timer, self._replay = timer, replay

    def choose(
        self, name: str, backend: SumMethod, own: Mapping[str, SumMethod], *, own_rows: bool = False
    ) -> AllReduce:
        """What sums tensors.

        Args:
            name: ``auto``, or one method for all sizes.
            backend: The method that needs no test.
            own: Other methods of this machine, by name; only methods that all ranks have are used.
            own_rows: Whether to time the two exchanges of data-parallel attention: rows to all ranks, and sums of a rank's own
                rows back. No rank needs the others' sums then, so two-shot is left out.

        Raises:
            ConfigError: The method that ``name`` asks for cannot be used.
        """
        asked = {each: method for each, method in own.items() if name in ("auto", each)}
        if own_rows:
            asked.pop("two-shot", None)
        exact, refused = self._exact(asked, sum_cases)
        methods: dict[str, SumMethod] = {backend.name: backend, **exact}
        if name not in ("auto", *methods):
            raise ConfigError(f"--all-reduce {name}: it cannot be used here; the log says why")
        size, dtype = self._group.size, self._dtypes[0]
        x = torch.zeros(SUM_SIZES[-1] // dtype.itemsize, dtype=dtype, device=self._ops.device)

        def run(method: SumMethod, count: int) -> None:
            if own_rows:
                method.gather(method.scatter_sum(x[: count // size * size].view(size, -1)))
            else:
                method.sum(x[:count])

        times = self._measure(methods, run)
        picked = _quickest(times) if name == "auto" else [(each, name) for each in SUM_SIZES]
        table = AllReduce(_choices([(most, methods[each]) for most, each in picked], backend), times, refused)
        logger.info("all-reduce over %d ranks: %s", self._group.size, table.report.words)
        return table

    def choose_normed(self, name: str, table: AllReduce, own: Mapping[str, NormedMethod]) -> None:
        """Sets in a table the quickest method for each size of sums that a residual and a norm follow: one of ``own``, or the
        table's sum with a separate norm.

        Args:
            name: As for :meth:`choose`.
            table: What sums.
            own: Methods that this machine has, by name.
        """
        asked = {each: method for each, method in own.items() if name in ("auto", each.removesuffix("+norm"))}
        apart = Apart(table, self._ops)
        exact, refused = self._exact(asked, normed_cases)
        for fault in refused.items():
            table.refuse(*fault)
        methods: dict[str, NormedMethod] = {apart.name: apart, **exact}
        if len(methods) == 1:
            return
        ops, dtype = self._ops, self._dtypes[0]
        x, residual = torch.zeros(2, SUM_SIZES[-1] // dtype.itemsize, dtype=dtype, device=ops.device).unbind()
        norms = {
            width: TrialNorm(width, ops, dtype) for width in {min(WIDTH, each // dtype.itemsize) for each in SUM_SIZES}
        }

        def run(method: NormedMethod, count: int) -> None:
            width = min(WIDTH, count)
            rows = residual[:count].view(-1, width)
            if method.add(x[:count].view(-1, width), rows, norms[width]) is None:
                norms[width](rows)

        times = self._measure(methods, run)
        table.choose_normed(_choices([(size, methods[each]) for size, each in _quickest(times)], apart), times)
        logger.info("all-reduce over %d ranks: %s", self._group.size, table.report.words)

    def _exact(
        self,
        own: Mapping[str, MethodT],
        cases: Callable[[MethodT, torch.dtype, DeviceOps, Group], Iterable[Case]],
    ) -> tuple[dict[str, MethodT], dict[str, str]]:
        """The methods that all ranks have and that are right on all ranks, and the faults of the other methods."""
        found, refused = {}, {}
        for name in sorted(set.intersection(*(set(each) for each in self._group.exchange(sorted(own), list[str])))):
            fault = self.fault(
                case for dtype in self._dtypes for case in cases(own[name], dtype, self._ops, self._group)
            )
            if fault:
                logger.warning("all-reduce: %s is not used: %s", name, fault)
                refused[name] = fault
            else:
                found[name] = own[name]
        return found, refused

    def fault(self, cases: Iterable[Case]) -> str:
        """The first fault in any of the cases, on any rank; empty: none."""
        for case in cases:
            faults = [(rank, each) for rank, each in enumerate(self._group.exchange(self._try(case), str)) if each]
            if faults:  # all ranks stop here
                return "rank {}: {}".format(*faults[0])
        return ""

    def _try(self, case: Case) -> str:
        """Runs a case on this rank, once alone and then repeatedly as in steps; returns the fault."""
        said, x = "", case.x
        run = case.run
        x.zero_()
        try:  # a rank may compile for longer than others wait, so the result of this call is ignored
            run()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if any(self._group.exchange(said, str)):
            return said
        for turn in range(_ROUNDS):
            generator = torch.Generator(x.device).manual_seed(1000 * turn + self._group.rank)
            values = torch.randn(len(x), generator=generator, device=x.device).to(x.dtype)
            every = self._group.all_gather(values).view(self._group.size, -1)
            try:
                if turn == 1:
                    run = self._replay(run)
                x.copy_(values)
                run()
                if wrong := case.wrong(every):
                    said = f"its {wrong} of {len(x)} numbers of {x.dtype} was wrong"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        return said

    def _measure(self, methods: Mapping[str, MethodT], run: Callable[[MethodT, int], None]) -> list[SumTime]:
        """Seconds of each method for each size: the slowest rank's."""
        found = []
        for size in SUM_SIZES:
            count = size // self._dtypes[0].itemsize
            for name, method in methods.items():
                if size <= method.most_bytes:
                    found.append((name, size, self._timer(partial(run, method, count))))
        every = self._group.exchange([seconds for _, _, seconds in found], list[float])
        return [SumTime(name, size, max(seconds)) for (name, size, _), *seconds in zip(found, *every, strict=True)]


def _choices(picked: Sequence[tuple[int, MethodT]], backend: MethodT) -> list[Choice[MethodT]]:
    """Joins neighbouring sizes of one method. Above the largest size of a method comes the backend, or another method without a
    limit."""
    runs = [list(run) for _, run in groupby(picked, key=lambda each: each[1].name)]
    choices = [Choice(run[-1][0], run[-1][1]) for run in runs[:-1]]
    last = runs[-1][-1][1]
    if last.most_bytes < math.inf:
        choices.append(Choice(last.most_bytes, last))
        last = backend
    return [*choices, Choice(math.inf, last)]


def _quickest(times: Sequence[SumTime]) -> list[tuple[int, str]]:
    """The method for each size: the method of the next smaller size, unless another is clearly quicker."""
    picked: list[tuple[int, str]] = []
    for size, of in groupby(times, key=lambda each: each.num_bytes):
        seconds = {each.method: each.seconds for each in of}
        best = min(seconds, key=seconds.__getitem__)
        before = picked[-1][1] if picked else best
        picked.append((size, before if seconds.get(before, math.inf) * _CLEARLY <= seconds[best] else best))
    return picked


def time_on_host(call: Callable[[], None]) -> float:
    """The quickest of some calls."""
    seconds = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def as_it_is(call: Callable[[], None]) -> Callable[[], None]:
    """A CPU's steps make the same calls each time."""
    return call
