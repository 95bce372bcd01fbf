"""Absorbed decodes that read shared vectors once give what each gives by itself: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels.attention.latent.heads import LatentHeads
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, SharedRuns, StoredPages, Variant
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.reference import quantise

pytest.importorskip("triton", reason="Triton is not installed")
latent_decode = pytest.importorskip("sapwood_kernels.attention.latent.decode")
shared_decode = pytest.importorskip("sapwood_kernels.attention.shared_decode")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = device_ops(DEVICE)
PAGE = 16
RUNS = SharedRuns(np.arange(6), *np.array([[0, 5, 0, 3 * PAGE], [1, 3, 3 * PAGE, 5 * PAGE]]).T)
"""Five of six requests share three pages, three of these two more."""


def check(*, heads: int, rank: int, rotary: int, float8: bool = False, padded: int = 0) -> None:
    torch.manual_seed(heads)
    shared, own = [3, 5, 5, 5, 3, 0], [5, 1, 40, 17, 30, 50]
    counts = [pages - (-more // PAGE) for pages, more in zip(shared, own, strict=True)]
    lengths = [pages * PAGE + more for pages, more in zip(shared, own, strict=True)] + [1] * padded
    fresh = iter(torch.randperm(sum(counts) + 1).tolist())
    table = [[next(fresh) for _ in range(count)] for count in counts]
    for first, count, begin, end in zip(RUNS.first, RUNS.count, RUNS.begin // PAGE, RUNS.end // PAGE, strict=True):
        for member in range(first, first + count):
            table[member][begin:end] = table[first][begin:end]
    table += [[next(fresh)]] * padded
    stored = torch.full((sum(counts) + 1, PAGE, 1, rank + rotary), float("nan"))
    for pages, length in zip(table, lengths, strict=True):
        at = torch.arange(length)
        places = torch.tensor(pages)[at // PAGE], at % PAGE
        stored[places] = torch.where(stored[places].isnan(), torch.randn(length, 1, rank + rotary), stored[places])
    if float8:
        stored = quantise(stored, 0.5)
    stored = stored.to(DEVICE)
    query = torch.randn(len(table), heads, rank + rotary).to(DEVICE)
    indptr = torch.from_numpy(np.cumsum([0, *map(len, table)]).astype(np.int32))
    indices = torch.tensor([page for pages in table for page in pages], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    shape = AttentionShape(heads, 1, rank + rotary, PAGE, torch.float32)
    cache = StoredPages(stored, stored[..., :rank], (0.5 if float8 else 1.0, 1.0), None)
    results = []
    for kernel, runs in (
        (latent_decode.LatentDecodeAttention, None),
        (latent_decode.SharedLatentDecodeAttention, RUNS),
    ):
        made = kernel(len(table) if padded else None, indices, shape, Variant(0.3, None, None, False), OPS)
        made.plan(torch.arange(len(table) + 1, dtype=torch.int32), PagedKeys(indptr, indices, last, runs))
        results.append(made.run(query, cache))
    heads_of = LatentHeads(torch.randn(heads, 20, rank).to(DEVICE), 12)
    values = made.values(query, cache, heads_of)
    torch.testing.assert_close(values, heads_of.values(results[1]), rtol=1e-3, atol=1e-3)
    assert made._shared.starts.tolist()[:6] == [48, 80, 80, 80, 48, 0]
    alone, together = results
    torch.testing.assert_close(together, alone, rtol=2e-3 if float8 else 1e-4, atol=1e-2 if float8 else 1e-5)


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without work take as long as others in the interpreter."""
    monkeypatch.setattr(shared_decode, "ITEMS", 16)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 4, "rank": 24, "rotary": 8},
        {"heads": 20, "rank": 16, "rotary": 16, "padded": 2},
        {"heads": 4, "rank": 24, "rotary": 8, "float8": True},
    ],
    ids=str,
)
def test_shared_vectors_read_once_give_what_each_request_gives_alone(options: dict[str, int]) -> None:
    check(**options)
