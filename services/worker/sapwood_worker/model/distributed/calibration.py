"""Chooses what sums tensors, by size: methods whose sums are exact are timed on this machine, by all ranks together."""

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


# Tensors by which methods that sum are tried: each tells what was wrong.


_COUNTS = (1, 1000, 100_003)
WIDTH = 4096
"""Numbers of a row that is normed: one, since a kernel is compiled for each."""
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
        """What the last run made wrong, given all ranks' tensors, [size, ...]; empty: nothing."""
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
    """Tensors of several sizes that a method takes which also adds a residual and norms."""
    cases = (_NormedCase(method, (rows, WIDTH), dtype, ops) for rows in _ROWS)
    yield from (case for case in cases if case.taken)


_ROUNDS = 4
_CALLS = 3
_CLEARLY = 0.9
"""What a method's seconds are to be of another's, at most, to take its place."""

Timer = Callable[[Callable[[], None]], float]
"""Seconds of one call, of several."""
Replay = Callable[[Callable[[], None]], Callable[[], None]]
"""What runs a call again as a model's steps do: where they are CUDA graphs, one of that call."""


class Trial:
    """Tries methods; called by all ranks together.

    Args:
        group: The ranks, whose ``all_gather`` gives what sums are compared with.
        ops: The operations of the device where the tensors are.
        dtypes: Of the tensors that are tried; the first is timed.
        timer: Measures a call.
        replay: Makes of a call what the model runs.
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
            name: ``auto``, or the method to take whatever the size.
            backend: What needs no test.
            own: Other methods that this machine has, by name; those are used that all ranks have.
            own_rows: Whether ranks take rows to all ranks and get the sums of their own, and it is this that is timed. Nobody
                needs the others' sums then: two-shot is not among the methods.

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
        """Has a table take what is quickest for each size where a residual and a norm come after: one of ``own``, or a sum of the
        table's, then the rest.

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
        """The methods that all ranks have and that are right on all of them; and what is wrong with the others."""
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
        """What is wrong with any of the cases, on any rank; empty: nothing."""
        for case in cases:
            faults = [(rank, each) for rank, each in enumerate(self._group.exchange(self._try(case), str)) if each]
            if faults:  # all ranks stop here
                return "rank {}: {}".format(*faults[0])
        return ""

    def _try(self, case: Case) -> str:
        """What is wrong with a case, here: once as it comes, then again and again as steps do."""
        said, x = "", case.x
        run = case.run
        x.zero_()
        try:  # a rank may compile for longer than others wait: what comes of this one nobody looks at
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
    """Neighbouring sizes of one method together; above what it takes the backend, or what else takes all."""
    runs = [list(run) for _, run in groupby(picked, key=lambda each: each[1].name)]
    choices = [Choice(run[-1][0], run[-1][1]) for run in runs[:-1]]
    last = runs[-1][-1][1]
    if last.most_bytes < math.inf:
        choices.append(Choice(last.most_bytes, last))
        last = backend
    return [*choices, Choice(math.inf, last)]


def _quickest(times: Sequence[SumTime]) -> list[tuple[int, str]]:
    """The method for each size: that of the size before, unless another is clearly quicker."""
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
