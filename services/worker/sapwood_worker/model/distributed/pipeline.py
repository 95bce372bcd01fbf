"""Stages of a pipeline: the tensors that they exchange, and the micro-batches of a step.

Each send has a buffer of its own, and runs on a second queue of the device. So a stage continues to compute while a sent tensor
waits for its receiver, which may still compute an earlier step. All other exchanges run on the computing queue: the
computation there cannot continue without it, and a receive waiting on another queue would take multiprocessors from the
computation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.records.step import Step


class StageLink:
    """A stage's connections to the other stages.

    Args:
        stages: The stages; this rank's place among them is its stage.
        width: Numbers of a token's hidden state.
        dtype: Their dtype.
        ops: The device's operations.

    Attributes:
        first, last: Whether this is the first, or the last, stage. alone: Whether this is the only stage, so that there is
        nothing to exchange.
    """

    def __init__(self, stages: Group, width: int, dtype: torch.dtype, ops: DeviceOps) -> None:
        self.first, self.last = stages.rank == 0, stages.rank == stages.size - 1
        self.alone = self.first and self.last
        self._stages, self._width, self._dtype, self._device = stages, width, dtype, ops.device
        if not self.last:
            self._sending = ops.side_queue()

    def receive(self, tokens: int) -> Tensor:
        """Returns [tokens, width]: the next tensor from the stage before."""
        return self._stages.receive(self.empty(tokens), self._stages.rank - 1)

    def send(self, hidden: Tensor) -> None:
        """Sends [T, width] to the next stage; it may be overwritten at once."""
        own = hidden.clone()
        with self._sending.behind(own):
            self._stages.send(own, self._stages.rank + 1)

    def spread(self, hidden: Tensor) -> Tensor:
        """Overwrites [R, width] with the last stage's values; called by all stages. Returns the tensor."""
        return self._stages.broadcast(hidden, self._stages.size - 1)

    def empty(self, tokens: int) -> Tensor:
        """[tokens, width], undefined."""
        return torch.empty(tokens, self._width, dtype=self._dtype, device=self._device)


# Cuts a step into micro-batches, so that all stages of a pipeline compute at once.


_FEWEST_TOKENS = 16
"""The fewest tokens of a micro-batch."""
_TRIES = 3


class MicroBatches:
    """The micro-batches of a step. Tokens stay in order, so that a part of a prompt may begin in one micro-batch and end in the
    next.

    A stage takes ``fixed + n * each`` seconds for n tokens. M micro-batches of T tokens together are through S stages after
    ``(M + S - 1) * (fixed + T / M * each)``, which is least for ``M = sqrt((S - 1) * T * each / fixed)``. A step of decodes
    takes about the same time for one token as for many, so it is not cut.

    Args:
        stages: Stages: S.
        fixed: The seconds of a stage that do not depend on the tokens.
        each: The seconds for each additional token.

    Attributes:
        reason: The measured times of a stage, for people.
    """

    def __init__(self, stages: int, fixed: float, each: float) -> None:
        self._ratio = (stages - 1) * each / max(fixed, 1e-9)
        self.reason = f"a stage takes {fixed * 1e3:.2f} ms and {each * 1e6:.1f} us for each token"

    def count(self, tokens: int) -> int:
        """Into how many chunks a step of this many tokens is cut."""
        return max(1, min(round(math.sqrt(self._ratio * tokens)), tokens // _FEWEST_TOKENS))

    def of(self, step: Step) -> list[Step]:
        """The step's micro-batches, about equally large. They sample nothing by themselves."""
        total = len(step.token_ids)
        count = self.count(total)
        if count == 1:
            return [step]
        return [_cut(step, start, end) for start, end in pairwise(total * i // count for i in range(count + 1))]


def measured(parallel: Parallel, compute: Callable[[int], object], most: int) -> MicroBatches:
    """Measures steps of few tokens and of ``most`` tokens, and returns the cuts; called by all ranks together.

    Args:
        parallel: The groups; of several stages.
        compute: Computes a step of a given number of tokens to its end.
        most: Tokens of the larger step.
    """
    few = min(_FEWEST_TOKENS, most)
    seconds = []
    for tokens in (few, most):
        tries = []
        for _ in range(_TRIES):  # the first is slower
            began = time.perf_counter()
            compute(tokens)
            tries.append(time.perf_counter() - began)
        seconds.append(min(tries))
    # All ranks use the slowest rank's seconds, so that all cut steps in the same way.
    stages = parallel.pp.size
    short, long = (max(each) / stages for each in zip(*parallel.exchange(seconds, list[float]), strict=True))
    each = max(long - short, 0.0) / max(most - few, 1)
    return MicroBatches(stages, max(short - few * each, short / 2), each)


def _cut(step: Step, start: int, end: int) -> Step:
    """The part of the step that computes its tokens from ``start`` to ``end``."""
    ends = np.cumsum(step.counts)
    begins = ends - step.counts
    own = (begins < end) & (ends > start)
    first = np.maximum(begins[own], start)
    counts = np.minimum(ends[own], end) - first
    return replace(
        step,
        rows=step.rows[own],
        starts=step.starts[own] + first - begins[own],
        counts=counts,
        samples=np.zeros_like(counts),
        token_ids=step.token_ids[start:end],
        pages=step.pages[own],
    )
