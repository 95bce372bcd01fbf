"""Attention backends as the worker plans them: against the reference, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from sapwood_kernels.attention.planned import AttentionShape
from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer, AttentionNeeds
from sapwood_worker.model.attention.flashinfer import FLASHINFER
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.attention.torch_native import TORCH
from sapwood_worker.model.attention.triton import TRITON
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.records.kv_layout import KVComponent, KVLayout, Order

HEADS, KV_HEADS, DIM, PAGE = 8, 4, 128, 16


class Case:
    """A ragged batch over a pool of random keys and values, and what attention of layer 0 must give."""

    def __init__(
        self,
        query_lens: list[int],
        prefix_lens: list[int],
        window: int | None,
        float8: bool,
        backends=(FLASHINFER, FLASHINFER),
        order: Order = "HND",
    ) -> None:
        torch.manual_seed(len(query_lens))
        queries, seqs = np.array(query_lens), np.array(query_lens) + np.array(prefix_lens)
        counts = -(-seqs // PAGE)
        device = torch.device("cuda")
        scales = KVScales((0.5,), (2.0,)) if float8 else None
        kept = KVComponent((0,), 2, KV_HEADS, DIM, "float8_e4m3fn" if float8 else "bfloat16")
        self.pool = DevicePool(KVLayout((kept,), PAGE, order), int(counts.sum()) + 2, device, scales)
        table = np.zeros((len(counts), int(counts.max())), np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.random.default_rng(0).permutation(int(counts.sum()))
        slots = [
            table[i, np.arange(length) // PAGE].astype(np.int64) * PAGE + np.arange(length) % PAGE
            for i, length in enumerate(seqs)
        ]
        everything = torch.from_numpy(np.concatenate(slots)).to(device)
        written = torch.randn(2, len(everything), KV_HEADS, DIM, device=device).bfloat16()
        to = self.pool.destination(0, everything)
        to.store(*written)
        self.query = torch.randn(int(queries.sum()), HEADS, DIM, device=device).bfloat16()
        new = torch.from_numpy(np.concatenate([each[-n:] for each, n in zip(slots, query_lens, strict=True)]))
        starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int64)
        self.batch = AttentionBatch(starts, seqs.astype(np.int64), table, new.to(device))
        self.layer = AttentionLayer(0, DIM**-0.5, window)
        stored = [
            (reference.dequantise(each, scale) if float8 else each.float()).flatten(0, 1).cpu()
            for each, scale in zip((to.keys, to.values), self.pool.scales.of(0), strict=True)
        ]
        self.expected = reference.paged_attention(
            self.query.float().cpu(), *stored, torch.from_numpy(table).long(), torch.from_numpy(queries),
            torch.from_numpy(seqs), PAGE, scale=DIM**-0.5, window=window,
        )  # fmt: skip
        shape = AttentionShape(HEADS, KV_HEADS, DIM, PAGE, torch.bfloat16)
        needs = AttentionNeeds(shape, self.pool.dtype, (self.layer.kind,), 4096)
        ops = device_ops(device)
        for backend in backends:
            refusal = backend.abilities.refusal(needs, ops)
            if refusal is not None:
                pytest.skip(refusal)
        self.backend = PagedAttention(needs, self.pool, ops, *backends)

    def check(self, got: torch.Tensor) -> None:
        wanted = self.expected.flatten(1)
        assert float((got.float().cpu().flatten(1) - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize(
    "backends", [(FLASHINFER, FLASHINFER), (TRITON, TRITON), (TORCH, TRITON)], ids=["flashinfer", "triton", "mixed"]
)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(
    ("query_lens", "prefix_lens"),
    [([40, 300, 1], [0, 50, 200]), ([1, 1, 1, 200, 17], [33, 500, 16, 0, 90]), ([1, 1], [30, 400])],
    ids=["prompts", "decodes and prompts", "decodes"],
)
def test_a_planned_step_equals_the_reference(
    query_lens, prefix_lens, window: int | None, float8: bool, backends, order: Order
):
    case = Case(query_lens, prefix_lens, window, float8, backends, order)
    case.check(case.backend.plan(case.batch).attend_cached(case.layer, case.query))


@pytest.mark.parametrize("backend", [FLASHINFER, TRITON], ids=["flashinfer", "triton"])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("batch", [3, 24, 130])
def test_decodes_at_fixed_addresses_equal_the_reference(batch: int, float8: bool, backend, order: Order):
    case = Case([1] * batch, [7 + 61 * i % 2000 for i in range(batch)], None, float8, (backend, backend), order)
    make = case.backend.graphs()
    assert make is not None
    attention = make(batch)
    attention.plan(case.backend.with_keys(case.batch))
    case.check(attention.attend(case.layer, case.query))
