"""Decode graphs without a GPU: a replay computes what would have been captured, at the same addresses, by the plans' numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_kernels.attention.planned import PagedKeys, StoredPages, Variant
from sapwood_kernels.lora.slots import GraphRows
from sapwood_worker.model.attention.backend import AttentionParts, StepAttention
from sapwood_worker.model.attention.paged import KernelAttention, LatentKernelAttention, PagedAttention, PagedPlan
from sapwood_worker.model.attention.torch_native import TORCH
from sapwood_worker.model.runner.graphs.cuda_graph import DecodeGraphs, DecodeResult, _Captured
from sapwood_worker.model.runner.model_runner import ModelRunner


class GatheredAttention:
    """Implements ``PlannedLatentAttention``, which advances, of decodes at fixed addresses: keys are gathered page by page.

    Args:
        batch: The decodes.
        parts: Whose page indices it reads.
        variant: The kind of layer.
    """

    def __init__(self, batch: int, parts: AttentionParts, variant: Variant) -> None:
        self._parts = parts
        self._scale = variant.scale
        self._lengths = torch.ones(batch, dtype=torch.int64)
        self._indptr = torch.zeros(batch + 1, dtype=torch.int64)

    def plan(self, query_indptr: Tensor, keys: PagedKeys) -> None:
        self._indptr.copy_(keys.indptr)
        self._lengths.copy_(keys.lengths(self._parts.needs.shape.page_size))

    def advance(self, by: int | Tensor) -> None:
        self._lengths.add_(by)

    def run(self, query: Tensor, cache: StoredPages, out: Tensor | None = None) -> Tensor:
        size, rows = self._parts.needs.shape.page_size, []
        for at, (first, length) in enumerate(zip(self._indptr.tolist(), self._lengths.tolist(), strict=False)):
            assert 0 < length <= (int(self._indptr[at + 1]) - first) * size, "a plan's pages hold its keys"
            pages = self._parts.indices[first : first - (-length // size)].long()
            keys, values = (each[pages].flatten(0, 1)[:length] for each in (cache.keys, cache.values))
            times = query.shape[1] // keys.shape[1]
            keys, values = (each.repeat_interleave(times, 1) for each in (keys, values))
            weights = torch.einsum("hd,nhd->hn", query[at], keys).mul(self._scale).softmax(-1)
            rows.append(torch.einsum("hn,nhd->hd", weights, values))
        return torch.stack(rows) if out is None else out.copy_(torch.stack(rows))

    def values(self, query: Tensor, cache: StoredPages, heads: LatentHeads) -> Tensor:
        return heads.values(self.run(query, cache))


class _Replay:
    """Computes what a graph would replay, into the same tensors each time."""

    def __init__(self, compute: Callable[[], Any], result: Any) -> None:
        self._compute = compute
        self._result = result

    def replay(self) -> None:
        for mine, found in zip(_tensors(self._result), _tensors(self._compute()), strict=True):
            mine.copy_(found)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [result.logits, result.greedy, *(each for each in (result.drawn, result.hidden) if each is not None)]


class EagerGraphs(DecodeGraphs):
    """Implements ``DecodeGraphs`` where nothing can be captured."""

    def _capture(self, size: int, attention: StepAttention, rows: GraphRows | None = None) -> _Captured:
        plan = PagedPlan(self._pool, attention, attention, None, [slots[:size] for slots in self._slots])
        config = self._model.config
        hidden = torch.zeros(size, config.hidden_size)
        result = DecodeResult(
            torch.zeros(size, config.vocab_size),
            torch.zeros(size, dtype=torch.int64),
            self._inputs[2, :size],
            None if self._drawing is None else torch.zeros(size, dtype=torch.int64),
            None if self._shifted is None else hidden,
        )
        graph: Any = _Replay
        if (stage := self._stage) is None:
            return _Captured(graph(lambda: self._step(size, plan, rows), result), attention, result)
        hidden = torch.zeros_like(stage.last[:size])
        self._tails[size] = graph(lambda: self._tail(stage, size), result), result
        return _Captured(graph(lambda: self._layers(stage, size, plan, rows), hidden), attention, result, hidden)

    def _capture_all(self, sizes: Sequence[int], make: Callable[[int], StepAttention]) -> dict[int, _Captured]:
        return {size: self._capture(size, make(size)) for size in sizes}


def with_graphs(runner: ModelRunner, sizes: Sequence[int], *, capture: bool = True) -> EagerGraphs:
    """Gives a runner on a CPU graphs of these sizes, ascending; or, without ``capture``, computes such steps once."""

    def decodes(parts: AttentionParts) -> Callable[[int], StepAttention]:
        kind_of = LatentKernelAttention if parts.needs.latent else KernelAttention
        return lambda batch: kind_of(
            parts.pool, {kind: GatheredAttention(batch, parts, kind) for kind in parts.needs.kinds}
        )

    needs, pool, ops = runner._backend._parts[0].needs, runner._pool, runner.ops
    gathered = replace(TORCH, graphs=decodes, reads_keys=True)
    backend = PagedAttention(needs, pool, ops, gathered, gathered)
    make = backend.graphs()
    drawing = runner._sampler.drawing
    assert make is not None
    with patch.object(torch.Tensor, "pin_memory", lambda self: self):
        graphs = EagerGraphs(
            runner._model, backend, make, None, pool, sizes, runner._last_tokens, drawing, ops, runner._shifted,
            runner.loras, capture=capture,
        )  # fmt: skip
    runner._graphs = graphs
    return graphs
