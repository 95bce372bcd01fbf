"""The states of layers that keep one for each request instead of keys and values, and a step's way through them.

A slot holds a request's state in all layers. Slot i, for i below the rows of the page table, is that of the request in row i;
the others hold snapshots. Invariant: a slot is zeroed, or filled from a snapshot, in the step in which a row gets its request
(:meth:`StatePool.begin`), before anything reads it. All copies are queued in order with the computation.

Algorithm: a part of a step is cut where a snapshot of its state is wanted. The pieces are grouped into runs: the first pieces
of all parts, then the second ones, and so on, each group of equal length together. So decodes are one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.state.contracts import Slots, StateSteps
from sapwood_kernels.state.spans import Spans, tables

IntArray = npt.NDArray[np.int64]

Scan = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes inputs [B, T, C] with the states of a layer, float32 [slots, numbers], in slots int64 [B], which it writes in place;
returns [B, T, D]."""

Advance = Callable[[StateSteps, Slots], Tensor]
"""Advances the states of a layer by kernels, in place; returns what the layer makes of them, [T, D]."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens whose states advance together.

    Attributes:
        slots: int64 [B] on the device: the slots of their requests.
        tokens: Which tokens of the step: B times the same number, request after request; a range, or int64 on the device.
        saves: int64 [2, S] on the device: slots, and those that get copies of them after the run; None: there are none.
        ops: The device's operations; None: nothing is saved.
    """

    slots: Tensor
    tokens: slice | Tensor
    saves: Tensor | None
    ops: DeviceOps | None = None

    def save(self, states: Tensor) -> None:
        """Takes the snapshots of a layer's states, float32 [slots, numbers]."""
        if self.saves is not None:
            assert self.ops is not None
            self.ops.copy_states(states[None], self.saves)


class StatePool:
    """The slots.

    Args:
        layers: The layers that keep states.
        rows: Rows of the page table.
        snapshots: Further slots.
        numbers: Numbers of a layer's state.
        device: Where they lie.

    Attributes:
        rows, snapshots: The arguments.
    """

    def __init__(self, layers: Sequence[int], rows: int, snapshots: int, numbers: int, device: torch.device) -> None:
        self.rows, self.snapshots = rows, snapshots
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._states = torch.zeros(len(layers), rows + snapshots, numbers, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self._states.nbytes

    def layer(self, layer: int) -> Tensor:
        """The states of a layer: float32 [slots, numbers], a view."""
        return self._states[self._place[layer]]

    def begin(self, rows: IntArray, snapshots: IntArray, ops: DeviceOps) -> None:
        """Readies the slots of rows that get requests.

        Args:
            rows: int64 [N]: the rows, each once.
            snapshots: int64 [N]: the snapshot that each request continues from; -1: it begins with zeros.
            ops: The device's operations.
        """
        fresh, known = rows[snapshots < 0], rows[snapshots >= 0]
        if len(fresh):
            self._states.index_fill_(1, ops.to_device(fresh), 0.0)
        if len(known):
            pairs = np.stack((snapshots[snapshots >= 0] + self.rows, known))
            ops.copy_states(self._states, ops.to_device(pairs))

    def save(self, rows: IntArray, snapshots: IntArray, ops: DeviceOps) -> None:
        """Takes snapshots of all layers' states.

        Args:
            rows: int64 [N]: the rows whose states are copied.
            snapshots: int64 [N]: the snapshots that become their copies, each once.
            ops: The device's operations.
        """
        ops.copy_states(self._states, ops.to_device(np.stack((rows, snapshots + self.rows))))

    def decodes(self, slots: Tensor) -> StatePlan:
        """A step of one token a row, for a graph: it reads the slots at each replay.

        Args:
            slots: int64 [T] on the device: each row's; -1: the row is padding.
        """
        return StatePlan(self, [StateRun(slots, slice(0, len(slots)), None)])

    def plan(self, rows: IntArray, counts: IntArray, saves: IntArray, ops: DeviceOps) -> StatePlan:
        """A step's way through the states.

        Args:
            rows: int64 [P]: each part's row.
            counts: int64 [P]: its tokens.
            saves: int64 [S, 3]: snapshots that are taken: a part, after how many of its tokens, and the snapshot's slot.
            ops: The device's operations.
        """
        if ops.state_prompts is not None and (counts > 1).any():
            into = saves.copy()
            into[:, 2] += self.rows
            return StatePlan(self, (), tables(np.cumsum(counts) - counts, counts, rows, into, ops.to_device))
        return StatePlan(self, [self._run(*each, ops) for each in _pieces(rows, counts, saves)])

    def _run(self, slots: IntArray, tokens: IntArray, saves: IntArray, ops: DeviceOps) -> StateRun:
        adjacent = len(tokens) == tokens[-1] - tokens[0] + 1
        where = slice(int(tokens[0]), int(tokens[-1]) + 1) if adjacent else ops.to_device(tokens)
        copies = None
        if len(saves):
            copies = ops.to_device(np.stack((saves[:, 0], saves[:, 1] + self.rows)))
        return StateRun(ops.to_device(slots), where, copies, ops)


def _pieces(rows: IntArray, counts: IntArray, saves: IntArray) -> list[tuple[IntArray, IntArray, IntArray]]:
    """The runs of a step: for each the slots, the tokens, and the saves after it as pairs of a slot and a snapshot."""
    firsts = np.cumsum(counts) - counts
    if not len(saves) and (counts == 1).all():
        return [(rows, firsts, saves[:, :2])]
    # By the number of the piece within its part, and its length: parts, begins and saves.
    groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    cuts: dict[int, list[tuple[int, int]]] = {}
    for part, after, snapshot in saves.tolist():
        cuts.setdefault(part, []).append((after, snapshot))
    for part, count in enumerate(counts.tolist()):
        begin, nth = 0, 0
        for after, snapshot in sorted(cuts.get(part, ())):
            groups.setdefault((nth, after - begin), []).append((part, begin, snapshot))
            begin, nth = after, nth + 1
        if begin < count:
            groups.setdefault((nth, count - begin), []).append((part, begin, -1))
    runs = []
    for (_, length), members in sorted(groups.items(), key=lambda each: each[0][0]):
        parts, begins, snapshots = np.array(members, np.int64).T
        tokens = ((firsts[parts] + begins)[:, None] + np.arange(length)).ravel()
        pairs = np.stack((rows[parts], snapshots), 1)[snapshots >= 0]
        runs.append((rows[parts], tokens, pairs))
    return runs


class StatePlan:
    """A planned step, as layers see it.

    Args:
        pool: The states.
        runs: What is computed together, in order.
        spans: The tokens of all requests, in place of runs, for kernels that take them together; None: there are runs.
    """

    def __init__(self, pool: StatePool, runs: Sequence[StateRun], spans: Spans | None = None) -> None:
        self._pool, self._runs, self._spans = pool, runs, spans
        tokens = runs[0].tokens if len(runs) == 1 else None
        self._alone = isinstance(tokens, slice) and tokens.stop - tokens.start == len(runs[0].slots)

    def scan(self, layer: int, inputs: Tensor, width: int, scan: Scan) -> Tensor:
        """Runs a layer's recurrence over all tokens: [T, C] -> [T, width]. Advances the states and takes the snapshots.

        Args:
            layer: The layer.
            inputs: What it reads of each token.
            width: Numbers of its output.
            scan: The recurrence.
        """
        states = self._pool.layer(layer)
        out = inputs.new_empty(len(inputs), width)
        for run in self._runs:
            some = inputs[run.tokens] if isinstance(run.tokens, slice) else inputs.index_select(0, run.tokens)
            result = scan(some.view(len(run.slots), -1, inputs.shape[1]), states, run.slots)
            if isinstance(run.tokens, slice):
                out[run.tokens] = result.reshape(-1, width)
            else:
                out.index_copy_(0, run.tokens, result.reshape(-1, width))
            run.save(states)
        return out

    def step(self, layer: int, ops: DeviceOps, advance: Advance) -> Tensor | None:
        """Advances a layer's states by the device's kernels and takes the snapshots.

        Args:
            layer: The layer.
            ops: The device's operations.
            advance: Calls its kernels.

        Returns:
            Its result; None: nothing was done, because the device has no kernels for such a step.
        """
        states = self._pool.layer(layer)
        if self._spans is not None:
            assert ops.state_prompts is not None
            return advance(ops.state_prompts, Slots(states, self._spans.spans[:, 0], self._spans))
        if not self._alone or ops.state_steps is None:
            return None
        [run] = self._runs
        out = advance(ops.state_steps, Slots(states, run.slots))
        run.save(states)
        return out
