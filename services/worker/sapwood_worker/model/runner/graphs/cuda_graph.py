"""CUDA graphs of the decode step: a ladder of batch sizes, captured once, replayed with new contents at the same addresses.

A decode step of a small model is hundreds of kernels of a few microseconds; if they were launched one by one, the host would be
the bottleneck. A batch runs on the next larger size of the ladder; padding rows write to a scratch page, and to no state. All
graphs share one memory pool, captured from the largest down, so the ladder costs little more memory than its largest size.

A stage of a pipeline has two graphs for each size: one for its layers, and one for the work after the last stage. The exchange
between stages is launched between the two graphs, and the next step's layers may be launched there too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.lora.slots import GraphRows
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBatch, StepAttention, in_tables
from sapwood_worker.model.attention.paged import KernelAttention, PagedAttention, PagedPlan, Runs
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.heads.head import Head, ShiftedSteps
from sapwood_worker.model.lora.store import LoraStore
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.graphs.decode_rows import DecodeRows, LateStart, stage_chain
from sapwood_worker.records.step import IntArray

ResultT = TypeVar("ResultT")

_LEAST_SHARING, _STEP_DOWN = 4, 0.7
"""The smallest graph size for batches that share keys (unless the largest graph is smaller), and the largest ratio of a size to
the next."""


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then steps that grow, so that padding stays under a fifth beyond 16."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 257, 32), *range(320, 4097, 64)]
    return [size for size in sizes if size < largest] + [largest]


def sparse_ladder(sizes: Sequence[int]) -> list[int]:
    """The sizes of a ladder (ascending) for batches that share keys: fewer sizes, since sharing saves more than padding costs."""
    chosen = [sizes[-1]]
    for size in reversed(sizes):
        if _LEAST_SHARING <= size <= _STEP_DOWN * chosen[-1]:
            chosen.append(size)
    return chosen[::-1]


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The result of a replay: views of the graph's own buffers, valid until the next replay.

    Attributes:
        logits: [B, vocab_size], float32 or the model's dtype.
        greedy: int64 [B]: each row's likeliest token; -1 where its logits are not finite numbers.
        slots: int64 [B]: the requests' rows of the page table, as given.
        drawn: int64 [B]: each row's token, sampled with its request's settings, -1 likewise; None: tokens are not sampled here.
        hidden: [B, hidden_size]: a draft head's output for each token; None: it is no head.
    """

    logits: Tensor
    greedy: Tensor
    slots: Tensor
    drawn: Tensor | None
    hidden: Tensor | None = None

    def select(self, rows: Tensor) -> DecodeResult:
        """The results of some rows, int64 [R], as new tensors; of a model."""
        logits, greedy, slots = (each.index_select(0, rows) for each in (self.logits, self.greedy, self.slots))
        return DecodeResult(logits, greedy, slots, None if self.drawn is None else self.drawn.index_select(0, rows))

    def first(self, count: int) -> DecodeResult:
        """The results of the first rows."""
        drawn, hidden = (None if each is None else each[:count] for each in (self.drawn, self.hidden))
        return DecodeResult(self.logits[:count], self.greedy[:count], self.slots[:count], drawn, hidden)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    attention: StepAttention
    result: DecodeResult
    # For a stage: the output of its layers, which is all that this graph computes. The result is that of the second graph.
    hidden: Tensor | None = None


class DecodeGraphs:
    """Captures and replays decode steps.

    Args:
        model: The model, or a head that drafts.
        backend: The model's attention.
        make: Makes the attention for a number of decodes; it comes from ``backend.graphs()``.
        make_shared: The same for decodes that share keys, from ``backend.shared_graphs()``. They have separate graphs, so that
            other decodes stay as fast. None: no graphs for shared keys.
        pool: Keys and values.
        sizes: Batch sizes to capture, ascending, as :func:`ladder` gives them.
        last_tokens: int64 [rows of the page table]: each row's latest token, used if the host does not know it.
        drawing: int64 [rows of the page table, ``SETTINGS``]: the sampling settings of each row's request; None: it is a draft
            head, whose tokens are sampled outside the graph.
        ops: The device's operations.
        shifted: Takes a draft head's output for its tokens; None: it is a whole model.
        loras: The model's adapters; None: it has none. Steps with adapters have separate graphs, captured when they are first
            needed, so that other steps stay as fast.
        capture: Whether to capture graphs; else each step is computed once, so that its kernels are compiled.

    Attributes:
        columns: int64 [the largest size]: 0 and up, on the device.
    """

    def __init__(
        self,
        model: DecoderModel | Head,
        backend: PagedAttention,
        make: Callable[[int], StepAttention],
        make_shared: Callable[[int], StepAttention] | None,
        pool: DevicePool,
        sizes: Sequence[int],
        last_tokens: Tensor,
        drawing: Tensor | None,
        ops: DeviceOps,
        shifted: ShiftedSteps | None = None,
        loras: LoraStore | None = None,
        *,
        capture: bool = True,
    ) -> None:
        self._ops = ops
        self._shifted = shifted
        self._model = model
        self._backend = backend
        self._pool = pool
        self._scratch = pool.scratch_slots()
        self.columns = torch.arange(sizes[-1], device=pool.device)
        self._last_tokens = last_tokens
        self._sizes = list(sizes)
        # Its rows are token ids, positions, rows of the page table, cache slots of each group, the slots of states, and those
        # for a head's output: one copy brings all of them to the device.
        tables = len(pool.counts)
        rows = 3 + tables + (pool.states is not None) + (shifted is not None)
        self._inputs = torch.zeros(rows, self._sizes[-1], dtype=torch.int64, device=pool.device)
        self._staging = torch.zeros(rows, self._sizes[-1], dtype=torch.int64).pin_memory()
        self._slots = self._inputs[3 : 3 + tables].unbind()
        self._of_states = None if pool.states is None else 3 + tables
        self._stage = StageBuffers.of(model, sizes[-1])
        # The work after the last stage is computed after the next step's inputs have arrived.
        self._drawing = drawing if self._stage is None else None
        self._tails: dict[int, tuple[torch.cuda.CUDAGraph, DecodeResult]] = {}
        self._memory: Any = None  # torch's handle of the graphs' memory pool; its type is private
        every = self._capture_all if capture else self._compute_all
        self._shared = {} if make_shared is None else every(sparse_ladder(self._sizes), make_shared)
        self._captured = every(self._sizes, make)
        self._loras = loras
        # By the layers that adapters in slots have matrices for, and by size.
        self._adapted: dict[frozenset[int], dict[int, tuple[_Captured, GraphRows]]] = {}

    @property
    def largest(self) -> int:
        """The largest batch that :meth:`run` takes."""
        return self._sizes[-1]

    @property
    def most_pages(self) -> int:
        """The most pages that the rows of a batch may name together."""
        return self._backend.most_pages - self.largest  # a padding row names one

    def run(
        self,
        step: DecodeRows,
        of_ranks: Sequence[int] = (),
        *,
        idle: bool = False,
        late: tuple[Tensor, Tensor] | None = None,
        adapters: IntArray | None = None,
    ) -> DecodeResult:
        """Computes B tokens, writes their KV, and returns their logits; asynchronous. Rows of one request may see each other.

        Args:
            step: The tokens.
            of_ranks: Tokens of each rank, where ranks replay graphs of one size together.
            idle: Whether the rows are only padding: this rank has no tokens and only keeps pace with the others.
            late: int64 [N] and int64 [N]: rows whose token only the device knows, and that token; None: there are none.
            adapters: int64 [B]: the slot of each row's adapter, -1 without one; None: no row has one.
        """
        return self.begin(step, of_ranks, idle=idle, late=late, adapters=adapters)()

    def begin(
        self,
        step: DecodeRows,
        of_ranks: Sequence[int] = (),
        *,
        idle: bool = False,
        late: tuple[Tensor, Tensor] | None = None,
        adapters: IntArray | None = None,
    ) -> Callable[[], DecodeResult]:
        """Computes the layers only; takes what :meth:`run` takes. The returned function computes the rest; every stage calls it
        once, in the order of the steps. A model without stages is computed wholly."""
        count = len(step.token_ids)
        adapted = None if adapters is None else self._adapted_graph(max((count, *of_ranks)))
        self._backend.begin_plan()
        positions, lengths = step.positions, step.positions + 1
        tables = step.pages.reshape(count, len(self._scratch), -1).swapaxes(0, 1)
        runs = None
        if self._shared and adapted is None:
            together = lengths if step.prompts is None else np.where(step.prompts, 1, lengths)
            runs = self._backend.find_shared(list(tables), together)
        graphs = self._captured if runs is None else self._shared
        sizes = list(graphs)
        size = sizes[bisect_left(sizes, max((count, *of_ranks)))]
        captured = graphs[size]
        if adapted is not None and adapters is not None and self._loras is not None:
            captured, rows_of_slots = adapted
            size = rows_of_slots.count
            self._loras.replay(rows_of_slots, adapters)
        page_size = self._pool.page_size
        rows = np.arange(count)
        staged = self._staging.numpy()
        staged[:, :size] = 0
        staged[0, :count], staged[1, :count] = step.token_ids, positions
        staged[2, :count] = step.slots
        padded = []
        for row, (own, scratch) in enumerate(zip(tables, self._scratch, strict=True), 3):
            staged[row, :count] = own[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
            staged[row, count:size] = scratch
            padded.append(np.full((size, own.shape[1]), scratch // page_size, np.int32))
            padded[-1][:count] = own
        if self._of_states is not None:
            staged[self._of_states, :size] = -1
            if not idle:
                staged[self._of_states, :count] = step.slots
        if step.left is not None:
            staged[-1, :count] = step.left
            staged[-1, count:size] = self._scratch[0]
        self._inputs.copy_(self._staging, non_blocking=True)
        if late is not None:
            self._inputs[0].index_copy_(0, *late)
        lengths = np.concatenate((lengths, np.ones(size - count, np.int64)))
        self._plan(captured.attention, lengths, padded, runs)
        self._backend.end_plan()
        tokens = 0 if idle else count
        fewer = self._model.config.sparse and min((tokens, *of_ranks)) < size
        if self._stage is not None:
            self._stage.receive(count, size)
        with self._ops.padded(tokens, of_ranks) if fewer else nullcontext():
            captured.graph.replay()
        result = captured.result if count == size else captured.result.first(count)
        if self._stage is None or captured.hidden is None:
            return lambda: result
        hidden = captured.hidden[:count]
        self._stage.send(hidden)
        # The next step overwrites the inputs.
        return partial(self._finish, self._stage, size, hidden, replace(result, slots=result.slots.clone()))

    def _finish(self, stage: StageBuffers, size: int, hidden: Tensor, result: DecodeResult) -> DecodeResult:
        """Computes the work after the last stage; ``hidden`` is the output of that stage's layers."""
        stage.spread(hidden)
        self._tails[size][0].replay()
        return result

    def computed(self, count: int) -> Tensor:
        """int64 [count]: the tokens of the last step that was run, late ones with their values; valid until the next replay."""
        return self._inputs[0, :count]

    def chains(self, first: DecodeRows, steps: int) -> bool:
        """Whether :meth:`chain` can compute this many steps, from now or beginning later."""
        count, keys = len(first.slots), int(first.positions.max()) + steps
        if count > self.largest or len(self._scratch) > 1 or self._stage is not None or self._of_states is not None:
            return False
        size = self._sizes[bisect_left(self._sizes, count)]
        attention, pages = self._captured[size].attention, -(-keys // self._pool.page_size)
        advances = isinstance(attention, KernelAttention) and attention.advances
        return advances and size * pages <= self._backend.most_pages

    def chain(
        self,
        first: DecodeRows,
        wanted: IntArray,
        choose: Callable[[int, DecodeResult], Tensor] | None = None,
        late: LateStart | None = None,
    ) -> list[Tensor]:
        """Computes steps one after another, each with the tokens of the one before; asynchronous, and the host waits for none of
        them. :meth:`chains` must have returned true.

        Args:
            first: The decodes of the first step, with pages for all steps; their tokens are the requests' latest.
            wanted: int64 [B]: for how many steps each request runs; with ``late``, at how many positions from ``first`` on it may
                be computed.
            choose: Takes a step's number, from 0, and its result, and returns tokens, int64 [B]; None: the likeliest tokens.
            late: The position where it begins, if only the device knows it; None: at ``first``.

        Returns:
            int64 [B] of each step: the tokens, -1 where the logits are not finite numbers; undefined for a request that has
            ended.
        """
        count = len(first.slots)
        captured = self._captured[self._sizes[bisect_left(self._sizes, count)]]
        attention = captured.attention
        assert isinstance(attention, KernelAttention)
        size = len(captured.result.greedy)
        places = int(wanted.max()) if late is None else late.most + late.steps
        staged = stage_chain(first, wanted, size, self._pool.page_size, self._scratch[0], places)
        inputs = self._ops.to_device(staged.inputs)
        self._plan(attention, staged.lengths, [staged.pages])
        if late is None:
            attention.advance(1 - places)
        else:
            offsets = inputs.new_zeros(size)
            offsets[:count] = late.offsets
            at = offsets + torch.arange(late.steps, device=inputs.device)[:, None]
            inputs = inputs.gather(0, at[:, None].expand(-1, inputs.shape[1], -1))
            attention.advance(offsets + (1 - places))
        slots = inputs[0, 2, :count]
        found = []
        for place, each in enumerate(inputs.unbind()):
            if place:
                attention.advance(1)
            self._inputs[:, :size].copy_(each)
            with self._ops.padded(count) if self._model.config.sparse and count < size else nullcontext():
                captured.graph.replay()
            result = captured.result.first(count)
            tokens = result.greedy.clone() if choose is None else choose(place, result)
            self._last_tokens.index_copy_(0, slots, tokens.clamp(min=0))
            found.append(tokens)
        return found

    def _plan(
        self,
        attention: StepAttention,
        lengths: npt.NDArray[np.int64],
        tables: list[npt.NDArray[np.int32]],
        runs: Runs | None = None,
    ) -> None:
        starts = np.arange(len(lengths) + 1)
        every = zip(tables, self._slots, runs or (None,) * len(tables), strict=True)
        batches = [AttentionBatch(starts, lengths, pages, slots, runs=shared) for pages, slots, shared in every]
        attention.plan(self._backend.with_keys(in_tables(batches)))

    def _capture_all(self, sizes: Sequence[int], make: Callable[[int], StepAttention]) -> dict[int, _Captured]:
        """Captures from the largest down; the result is ascending."""
        captured = {}
        for size in reversed(sizes):
            captured[size] = self._capture(size, make(size))
        return dict(reversed(captured.items()))

    def capture_adapted(self) -> None:
        """Captures all graphs of steps with adapters, for the adapters that are in slots."""
        for size in sparse_ladder(self._sizes):
            self._adapted_graph(size)

    def _adapted_graph(self, count: int) -> tuple[_Captured, GraphRows]:
        """The graph of a step of so many rows with adapters, and its rows' slots; captures it if need be."""
        assert self._loras is not None
        sizes = sparse_ladder(self._sizes)
        size = sizes[bisect_left(sizes, count)]
        graphs = self._adapted.setdefault(self._loras.key, {})
        if size not in graphs:
            self._loras.await_loads()  # which a capture could not wait for
            if self._pool.device.type == "cuda":
                torch.cuda.synchronize(self._pool.device)  # steps in flight read what a plan of padding overwrites
            rows = self._loras.graph_rows(size)
            graphs[size] = self._capture(size, self._captured[size].attention, rows), rows
        return graphs[size]

    def _compute_all(self, sizes: Sequence[int], make: Callable[[int], StepAttention]) -> dict[int, _Captured]:
        for size in reversed(sizes):
            plan = self._padding(size, make(size))
            if self._stage is None:
                self._step(size, plan)
            else:
                self._layers(self._stage, size, plan)
                self._tail(self._stage, size)
        return {}

    def _padding(self, size: int, attention: StepAttention) -> PagedPlan:
        """The plan of a step of padding rows."""
        size_of_page = self._pool.page_size
        tables = [np.full((size, 1), slot // size_of_page, np.int32) for slot in self._scratch]
        for slots, scratch in zip(self._slots, self._scratch, strict=True):
            slots.fill_(scratch)
        if self._shifted is not None:
            self._inputs[-1].fill_(self._scratch[0])
        self._plan(attention, np.ones(size, np.int64), tables)
        states = None
        if self._pool.states is not None and self._of_states is not None:
            self._inputs[self._of_states].fill_(-1)
            states = self._pool.states.decodes(self._inputs[self._of_states, :size])
        return PagedPlan(self._pool, attention, attention, None, [slots[:size] for slots in self._slots], states)

    def _capture(self, size: int, attention: StepAttention, rows: GraphRows | None = None) -> _Captured:
        """Captures a step of a number of rows; with adapters, if there are ``rows`` for their slots."""
        plan = self._padding(size, attention)
        if (stage := self._stage) is None:
            graph, result = self._record(lambda: self._step(size, plan, rows))
            return _Captured(graph, attention, result)
        graph, hidden = self._record(lambda: self._layers(stage, size, plan, rows))
        if size not in self._tails:
            self._tails[size] = self._record(lambda: self._tail(stage, size))
        return _Captured(graph, attention, self._tails[size][1], hidden)

    def _record(self, compute: Callable[[], ResultT]) -> tuple[torch.cuda.CUDAGraph, ResultT]:
        """A graph of what is computed, and its result, which each replay overwrites."""
        stream = torch.cuda.Stream(self._pool.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # compiles kernels and settles cuBLAS before the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's own threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = compute()
        self._memory = graph.pool()
        return graph, result

    def _adapting(self, rows: GraphRows | None) -> AbstractContextManager[None]:
        return nullcontext() if rows is None or self._loras is None else self._loras.capturing(rows)

    def _step(self, size: int, plan: PagedPlan, rows: GraphRows | None = None) -> DecodeResult:
        with self._adapting(rows):
            hidden = self._model(self._tokens(size), self._inputs[1, :size], plan)
        if self._shifted is not None:
            self._shifted.leave(hidden, self._inputs[-1, :size])
        return self._result(size, self._model.logits(hidden), None if self._shifted is None else hidden)

    def _layers(self, stage: StageBuffers, size: int, plan: PagedPlan, rows: GraphRows | None = None) -> Tensor:
        """The output of this stage's layers."""
        assert not isinstance(self._model, Head)
        positions = self._inputs[1, :size]
        begun = self._model.begin(self._tokens(size), positions) if stage.first else stage.received[:size]
        with self._adapting(rows):
            return self._model.compute(begun, positions, plan)

    def _tail(self, stage: StageBuffers, size: int) -> DecodeResult:
        """What follows the last stage."""
        assert not isinstance(self._model, Head)
        return self._result(size, self._model.head_of(stage.last[:size]), None)

    def _tokens(self, size: int) -> Tensor:
        token_ids = self._inputs[0, :size]
        return torch.where(token_ids < 0, self._last_tokens.index_select(0, self._inputs[2, :size]), token_ids)

    def _result(self, size: int, logits: Tensor, hidden: Tensor | None) -> DecodeResult:
        slots = self._inputs[2, :size]
        if self._drawing is None:
            return DecodeResult(logits, self._ops.row_max(logits)[1], slots, None, hidden)
        greedy, drawn = self._ops.draw_rows(logits, self._drawing, slots, self._inputs[1, :size])
        return DecodeResult(logits, greedy, slots, drawn, hidden)


# The buffers in which the graphs of a pipeline stage read other stages' tensors: always at the same address.


class StageBuffers:
    """Tensors that graphs read, and the calls that fill them outside the graphs.

    Args:
        model: The stage's part of the model.
        rows: Tokens of the largest graph.

    Attributes:
        first: Whether the stage gets tokens, and no tensor from another stage.
        received: [rows, hidden_size]: the tensor from the stage before; layers may overwrite it.
        last: [rows, hidden_size]: the output of the last stage's layers.
    """

    def __init__(self, model: DecoderModel, rows: int) -> None:
        self._link = model.link
        self.first = model.link.first
        self.received, self.last = (model.link.empty(rows).zero_() for _ in range(2))

    @classmethod
    def of(cls, model: DecoderModel | Head, rows: int) -> StageBuffers | None:
        """The buffers for a model; None: the model has no stages."""
        return None if isinstance(model, Head) or model.link.alone else cls(model, rows)

    def receive(self, tokens: int, rows: int) -> None:
        """Call before the layers: fills ``received`` with the tensor from the stage before, if there is one.

        Args:
            tokens: How many.
            rows: The graph's rows. Padding rows are set to zero, because layers would otherwise add to old values there.
        """
        if not self.first:
            self.received[:tokens].copy_(self._link.receive(tokens))
            if tokens < rows:
                self.received[tokens:rows].zero_()

    def send(self, hidden: Tensor) -> None:
        """Call after the layers: sends their output to the next stage, if there is one."""
        if not self._link.last:
            self._link.send(hidden)

    def spread(self, hidden: Tensor) -> None:
        """Fills ``last``; called by all stages.

        Args:
            hidden: [T, hidden_size]: the output of this stage's layers; only the last stage's is read.
        """
        last = self.last[: len(hidden)]
        self._link.spread(last.copy_(hidden) if self._link.last else last)
