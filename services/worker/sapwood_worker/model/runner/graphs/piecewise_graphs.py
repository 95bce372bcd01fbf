"""CUDA graphs of steps that compute prompts: all but the attention, in a piece for each layer.

A layer is nine kernels; launching them one by one takes the host 0.3 to 0.4 ms, so a step of a small model, or of few tokens,
waits for the host. The work between two layers' attention depends only on the number of tokens: it is captured for a ladder of
numbers and replayed as one launch. Attention, whose shape differs from step to step, is launched by itself. Rows that pad a step
to the ladder's next number write to a scratch page.

The exchange between stages of a pipeline is in no piece.

The captures share one memory pool: they are replayed in the order of their capture, one number of tokens at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionLayer
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.model.runner.graphs.cuda_graph import StageBuffers

_LAUNCH_SECONDS, _FLOAT8_LAUNCH_SECONDS = 12.5e-3 / 28, 20e-3 / 28
"""Seconds that the host takes to launch the kernels of a layer one by one, about."""
_SPARSE = 2.0
"""With experts, launching takes this many times as long."""
_OPERATIONS_A_SECOND, _FLOAT8_OPERATIONS_A_SECOND = 6e14, 1.1e15
"""Operations per second that matrix products reach on an H100 or H200, about."""
_FEWEST, _MOST = 256, 8192
_APART = 512


def worth_capturing(parameters: int, layers: int, *, float8: bool = False, sparse: bool = False) -> int:
    """The least number of tokens for which a step takes the device longer than the host; ``parameters`` are all layers'."""
    seconds = layers * (_FLOAT8_LAUNCH_SECONDS if float8 else _LAUNCH_SECONDS) * (_SPARSE if sparse else 1.0)
    operations = _FLOAT8_OPERATIONS_A_SECOND if float8 else _OPERATIONS_A_SECOND
    tokens = int(seconds * operations / (2 * parameters))
    return min(max(tokens // 128 * 128, _FEWEST), _MOST)


def token_ladder(largest: int) -> list[int]:
    """Numbers of tokens to capture: 16 apart at first, then four to each doubling, at most 512 apart: padding stays under 1/4."""
    sizes = list(range(16, 129, 16))
    while sizes[-1] < largest:
        step = min(sizes[-1] // 4, _APART)
        sizes += [sizes[-1] + step * part for part in (1, 2, 3, 4)]
    return [size for size in sizes if size < largest] + [largest]


class _Cut:
    """An ``AttentionPlan`` that ends the capture of a piece wherever attention is due, and begins the next.

    Args:
        pool: Keys and values.
        slots: int64 [T] for each group of the pool: the cache slots that they are written to.
        query: [T, heads, head_dim]: each piece writes its queries here.
        context: [T, heads, values' head_dim]: each piece reads the attention's output here.
        memory: The graphs' memory pool; None: nothing is captured, the pieces run as they are.
    """

    absorbed = states = None

    def __init__(self, pool: DevicePool, slots: Sequence[Tensor], query: Tensor, context: Tensor, memory: Any) -> None:
        self._pool = pool
        self._slots = slots
        self._query = query
        self._context = context
        self._memory = memory
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.layers: list[AttentionLayer] = []

    def begin(self) -> None:
        """Begins the capture of a piece."""
        if self._memory is not None:
            self.graphs.append(torch.cuda.CUDAGraph())
            self.graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def end(self) -> None:
        """Ends the capture of the piece."""
        if self._memory is not None:
            self.graphs[-1].capture_end()

    def destination(self, layer: AttentionLayer) -> KVDestination:
        return self._pool.destination(layer.index, self._slots[self._pool.group[layer.index]])

    def attend_cached(self, layer: AttentionLayer, query: Tensor) -> Tensor:
        """Returns a tensor that attention fills between this graph and the next."""
        self._query.copy_(query)
        self.end()
        self.layers.append(layer)
        self.begin()
        return self._context.view(len(self._context), -1)


class PiecewiseGraphs:
    """Captures and replays steps that compute prompts.

    Args:
        model: The model.
        backend: The model's attention.
        pool: Keys and values.
        sizes: Numbers of tokens to capture, ascending, as :func:`token_ladder` gives them.
        ops: The device's operations.
    """

    def __init__(
        self, model: DecoderModel, backend: PagedAttention, pool: DevicePool, sizes: Sequence[int], ops: DeviceOps
    ) -> None:
        self._ops = ops
        self._model = model
        self._backend = backend
        self._pool = pool
        self._sizes = list(sizes)
        shape, most = backend.shape, self._sizes[-1]
        # Its rows are token ids, positions and cache slots of each group.
        scratch = pool.scratch_slots()
        self._inputs = torch.zeros(2 + len(scratch), most, dtype=torch.int64, device=pool.device)
        self._scratch = torch.tensor(scratch, device=pool.device)[:, None]
        self._inputs[2:].copy_(self._scratch)
        latent = model.config.latent
        dims = (shape.head_dim, shape.head_dim) if latent is None else (latent.query_dim, latent.v_head_dim)
        self._query, self._context = (
            torch.zeros(most, shape.num_heads, dim, dtype=shape.dtype, device=pool.device) for dim in dims
        )
        self._stage = StageBuffers.of(model, most)
        self._captured: dict[int, tuple[_Cut, Tensor]] = {}
        memory = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):
                self._step(size, None)  # compiles kernels and settles cuBLAS before the capture
                stream.synchronize()
                self._captured[size] = self._step(size, memory)
                for graph in self._captured[size][0].graphs:  # the first replay is slower
                    graph.replay()
        torch.cuda.current_stream().wait_stream(stream)

    @property
    def largest(self) -> int:
        """The most tokens that :meth:`run` takes."""
        return self._sizes[-1]

    def run(self, batch: ForwardBatch, of_ranks: Sequence[int] = (), *, idle: bool = False) -> Tensor:
        """Computes :meth:`DecoderModel.forward`; asynchronous. The result is valid until the next call.

        Args:
            batch: The tokens.
            of_ranks, idle: As :meth:`DecodeGraphs.run` takes them.
        """
        plan = self._backend.plan(batch.attention)
        count = batch.lines.shape[1]
        size = self._sizes[bisect_left(self._sizes, max((count, *of_ranks)))]
        self._inputs[:, :count].copy_(batch.lines)
        if count < size:
            self._inputs[2:, count:size].copy_(self._scratch)
        cut, hidden = self._captured[size]
        if self._stage is not None:
            self._stage.receive(count, size)
        query, context = self._query[:count], self._context[:count]
        tokens = 0 if idle else count
        fewer = self._model.config.sparse and min((tokens, *of_ranks)) < size
        with self._ops.padded(tokens, of_ranks) if fewer else nullcontext():
            for graph, layer in zip(cut.graphs, cut.layers, strict=False):
                graph.replay()
                plan.attend_into(layer, query, context)
            cut.graphs[-1].replay()
        if self._stage is not None:
            self._stage.send(hidden[:count])
        return hidden[:count]

    def _step(self, size: int, memory: Any) -> tuple[_Cut, Tensor]:
        token_ids, positions, *slots = self._inputs[:, :size]
        cut = _Cut(self._pool, slots, self._query[:size], self._context[:size], memory)
        cut.begin()
        if self._stage is None or self._stage.first:
            begun = self._model.begin(token_ids, positions)
        else:
            begun = self._stage.received[:size]
        hidden = self._model.compute(begun, positions, cut)
        cut.end()
        return cut, hidden
