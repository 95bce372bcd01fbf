"""Chooses what sums tensors, by size: methods whose sums are exact are timed on this machine, by all ranks together."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_worker.model.distributed.all_reduce import AllReduce, Choice, SumMethod, add_up
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.records.model_info import SUM_SIZES, SumTime

logger = logging.getLogger(__name__)

_TRIED = (1, 1000, 100_003)
"""Numbers of the tensors that are summed to see whether a method is exact."""
_ROUNDS = 4
_CALLS = 3
_CLEARLY = 0.9
"""What a method's seconds are to be of another's, at most, to take its place."""

Timer = Callable[[Callable[[], None]], float]
"""Seconds of one call, of several."""
Replay = Callable[[Callable[[], None]], Callable[[], None]]
"""What runs a call again as a model's steps do: where they are CUDA graphs, one of that call."""


def choose(
    group: Group,
    backend: SumMethod,
    own: Mapping[str, SumMethod],
    *,
    name: str,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    timer: Timer,
    replay: Replay,
    own_rows: bool = False,
) -> AllReduce:
    """What sums a group's tensors; called by all ranks together.

    Args:
        group: The ranks, whose ``all_gather`` gives what sums are compared with.
        backend: What needs no test.
        own: Other methods that this machine has, by name; those are used that all ranks have.
        name: ``auto``, or the method to take whatever the size.
        device: Where the tensors are.
        dtypes: Of the tensors that are tried.
        timer: Measures a call.
        replay: Makes of a call what the model runs.
        own_rows: Whether ranks take rows to all ranks and get the sums of their own, and it is this that is timed. Nobody needs
            the others' sums then: two-shot is not among the methods.

    Raises:
        ConfigError: The method that ``name`` asks for cannot be used.
    """
    everywhere = set.intersection(*(set(each) for each in group.exchange(sorted(own)))) - {own_rows and "two-shot"}
    methods: dict[str, SumMethod] = {backend.name: backend}
    for each in sorted(everywhere):
        if name in ("auto", each):
            fault = _fault(group, own[each], device, dtypes, replay)
            if fault:
                logger.warning("all-reduce: %s is not used: %s", each, fault)
            else:
                methods[each] = own[each]
    if name != "auto":
        if name not in methods:
            raise ConfigError(f"--all-reduce {name}: it cannot be used here; the log says why")
        methods = {backend.name: backend, name: methods[name]}
    times = tuple(_measure(group, methods, device, dtypes[0], timer, own_rows=own_rows))
    picked = _quickest(times) if name == "auto" else [(size, name) for size in SUM_SIZES]
    table = AllReduce(_choices([(size, methods[each]) for size, each in picked], backend), times)
    logger.info("all-reduce over %d ranks: %s", group.size, table.report.words)
    return table


def _choices(picked: Sequence[tuple[int, SumMethod]], backend: SumMethod) -> list[Choice]:
    """Neighbouring sizes of one method together; above what it takes the backend."""
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


def _fault(group: Group, method: SumMethod, device: torch.device, dtypes: Sequence[torch.dtype], replay: Replay) -> str:
    """What is wrong with a method's sums, on any rank; empty: nothing."""
    for dtype in dtypes:
        for count in _TRIED:
            if group.size * count * dtype.itemsize > method.most_bytes:
                continue
            said = _try(group, method, torch.empty(count, dtype=dtype, device=device), replay)
            faults = [(rank, each) for rank, each in enumerate(group.exchange(said)) if each]
            if faults:  # all ranks stop here
                return "rank {}: {}".format(*faults[0])
    return ""


def _try(group: Group, method: SumMethod, x: Tensor, replay: Replay) -> str:
    """What is wrong with what a method makes of tensors like this one, here: once as they come, then again as steps do."""
    said = ""
    found: list[Tensor] = []

    def run() -> None:
        every = method.gather(x)
        found[:] = every, method.scatter_sum((group.rank + 1) * every)[0], x
        method.sum(x)

    call: Callable[[], None] = run
    for turn in range(_ROUNDS):
        generator = torch.Generator(x.device).manual_seed(1000 * turn + group.rank)
        values = torch.randn(len(x), generator=generator, device=x.device).to(x.dtype)
        every = group.all_gather(values).view(group.size, -1)
        own, whole = torch.empty_like(x), torch.empty_like(x)
        add_up([(rank + 1) * values for rank in range(group.size)], own)
        add_up(every.unbind(), whole)
        try:
            if turn == 1:
                call = replay(run)
            x.copy_(values)
            call()
            expected = {"gathering": every, "sum of own rows": own, "sum": whole}
            for (name, right), is_now in zip(expected.items(), found, strict=True):
                if not torch.equal(is_now, right):
                    said = f"its {name} of {len(x)} numbers of {x.dtype} was wrong"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return said


def _measure(
    group: Group,
    methods: Mapping[str, SumMethod],
    device: torch.device,
    dtype: torch.dtype,
    timer: Timer,
    *,
    own_rows: bool,
) -> list[SumTime]:
    """Seconds of each method for each size: the slowest rank's."""
    found = []
    for size in SUM_SIZES:
        x = torch.zeros(group.size, size // dtype.itemsize // group.size, dtype=dtype, device=device)

        def call(method: SumMethod, x: Tensor = x) -> None:
            if own_rows:
                method.gather(method.scatter_sum(x))
            else:
                method.sum(x)

        for name, method in methods.items():
            if size <= method.most_bytes:
                found.append((name, size, timer(partial(call, method))))
    every = group.exchange([seconds for _, _, seconds in found])
    return [SumTime(name, size, max(seconds)) for (name, size, _), *seconds in zip(found, *every, strict=True)]


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
