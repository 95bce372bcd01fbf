"""Chunks of prompts that read shared keys once against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, SharedRuns, StoredPages, Variant
from sapwood_kernels.ops.factory import device_ops

pytest.importorskip("triton", reason="Triton is not installed")
shared_prefill = pytest.importorskip("sapwood_kernels.attention.shared.prefill")
tiled_prefill = pytest.importorskip("sapwood_kernels.attention.tiled_prefill")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = device_ops(DEVICE)
PAGE = 16

ONE_LEVEL = [(range(1, 4), 0, 5)]
"""Places that share pages, from one on, up to another."""
THREE_LEVELS = [(range(5), 0, 3), (range(2), 3, 5), (range(2, 5), 3, 7), (range(3, 5), 7, 9)]


def check(
    tokens: list[int], shared: list[tuple[range, int, int]], *, alone: list[int] | None = None, float8=False, sinks=False,
    softcap=None,
) -> None:  # fmt: skip
    """``tokens``: new ones of each request; ``alone``: its keys between the shared ones and those."""
    torch.manual_seed(sum(tokens))
    batch, heads, kv_heads, dim = len(tokens), 4, 2, 16
    order = np.random.default_rng(1).permutation(batch)  # the place of a request is not its number
    before = alone or [3] * batch
    lengths = [0] * batch
    for place, request in enumerate(order):
        deepest = max((end for places, _, end in shared if place in places), default=0)
        lengths[request] = deepest * PAGE + before[request] + tokens[request]
    counts = [-(-length // PAGE) for length in lengths]
    total = sum(counts) + 3
    fresh = iter(torch.randperm(total).tolist())
    table = [[next(fresh) for _ in range(count)] for count in counts]
    for places, begin, end in shared:
        for place in places:
            table[order[place]][begin:end] = table[order[places[0]]][begin:end]
    keys = torch.full((total * PAGE, kv_heads, dim), float("nan"))  # what was never written must never be read
    values = keys.clone()
    for pages, length in zip(table, lengths, strict=True):
        at = torch.arange(length)
        slots = torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE
        keys[slots], values[slots] = torch.randn(2, length, kv_heads, dim)
    query = torch.randn(sum(tokens), heads, dim)
    sink = torch.randn(heads) * 3 if sinks else None
    kv_scales = (0.5, 4.0) if float8 else (1.0, 1.0)
    stored = [keys, values]
    if float8:
        stored = [reference.quantise(each, scale) for each, scale in zip(stored, kv_scales, strict=True)]
        keys, values = [reference.dequantise(each, scale) for each, scale in zip(stored, kv_scales, strict=True)]
    wide = torch.zeros(batch, max(counts), dtype=torch.int64)
    for i, pages in enumerate(table):
        wide[i, : len(pages)] = torch.tensor(pages)
    expected = reference.paged_attention(
        query, keys, values, wide, torch.tensor(tokens), torch.tensor(lengths), PAGE, scale=0.7, softcap=softcap, sinks=sink
    )  # fmt: skip
    fields = [[places[0], len(places), begin * PAGE, end * PAGE] for places, begin, end in shared]
    runs = SharedRuns(order, *np.array(fields, np.int64).reshape(-1, 4).T)
    indptr, rows = (torch.from_numpy(np.cumsum([0, *each]).astype(np.int32)) for each in (counts, tokens))
    indices = torch.tensor([page for pages in table for page in pages], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    shape, kind = AttentionShape(heads, kv_heads, dim, PAGE, torch.float32), Variant(0.7, None, softcap, sinks)
    parts = [tiled_prefill.TiledPrefillAttention(shape, kind, OPS, causal=causal) for causal in (True, False)]
    attention = shared_prefill.SharedPrefillAttention(*parts, PAGE, OPS)
    attention.plan(rows, PagedKeys(indptr, indices, last, runs))
    cache = StoredPages(
        *(each.view(total, PAGE, kv_heads, dim).to(DEVICE) for each in stored), kv_scales,
        None if sink is None else sink.to(DEVICE),
    )  # fmt: skip
    result = attention.run(query.to(DEVICE), cache)
    error = float((result.cpu().float() - expected).norm() / expected.norm())
    assert error < (0.01 if float8 else 1e-5)


@pytest.mark.parametrize("shared", [ONE_LEVEL, THREE_LEVELS], ids=["one level", "three levels"])
def test_equals_the_reference(shared: list[tuple[range, int, int]]):
    check([20, 1, 17, 3, 40], shared)


@pytest.mark.parametrize("options", [{"softcap": 5.0, "sinks": True}, {"float8": True}], ids=str)
def test_with_soft_cap_and_sinks_and_over_float8(options):
    check([5, 1, 7, 3, 2], THREE_LEVELS, **options)


def test_requests_whose_new_tokens_follow_on_what_is_shared():
    check([5, 16, 2, 3, 9], THREE_LEVELS, alone=[0, 0, 5, 0, 16])


def test_levels_come_one_after_the_other_whatever_the_runs_order():
    runs = SharedRuns(np.arange(5), *np.array([[3, 2, 0, 32], [0, 3, 0, 16], [1, 2, 16, 48]]).T)
    ordered = shared_prefill.by_level(runs)
    assert ordered.begin.tolist() == [0, 0, 16]
