"""Whole prompts by torch's attention compared with chunks by our own kernel: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant

pytest.importorskip("triton", reason="Triton is not installed")
whole_prompts = pytest.importorskip("sapwood_kernels.attention.whole_prompts")
cudnn_lengths = pytest.importorskip("sapwood_kernels.attention.cudnn_lengths")
tiled_prefill = pytest.importorskip("sapwood_kernels.attention.tiled_prefill")
cuda = pytest.importorskip("sapwood_kernels.ops.cuda")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
KIND = Variant(scale=0.3, window=None, softcap=None)


class Counting(tiled_prefill.TiledPrefillAttention):
    """Counts how often it runs."""

    ran = 0

    def run(self, *args, **others):
        self.ran += 1
        return super().run(*args, **others)


@pytest.mark.parametrize(
    ("tokens", "before", "rest"),
    [([60], [0], 0), ([60, 33], [0, 0], 0), ([5, 60, 40, 33, 7], [0, 0, 20, 0, 9], 1), ([5, 40], [0, 20], 1)],
    ids=["one", "two whole ones", "among others", "none is whole"],
)
def test_whole_prompts_and_others_are_the_references(tokens, before, rest, monkeypatch):
    monkeypatch.setattr(whole_prompts, "LEAST", 32)
    draw = torch.Generator().manual_seed(len(tokens))
    lengths = np.array(tokens) + before
    counts = -(-lengths // 16)
    total = int(counts.sum()) + 2
    pages = np.random.default_rng(0).permutation(total)[: counts.sum()].astype(np.int32)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    stored = torch.full((2, total, 16, 2, 16), float("nan"))  # what was never written must never be read
    table = np.zeros((len(tokens), counts.max()), np.int64)
    for row, (length, first) in enumerate(zip(lengths, indptr[:-1], strict=True)):
        own = pages[first : first + counts[row]]
        table[row, : len(own)] = own
        at = np.arange(length)
        stored[:, own[at // 16], at % 16] = torch.randn(2, int(length), 2, 16, generator=draw)
    query = torch.randn(sum(tokens), 4, 16, generator=draw)
    expected = reference.paged_attention(
        query, *stored.view(2, -1, 2, 16), torch.from_numpy(table), torch.tensor(tokens), torch.from_numpy(lengths), 16, scale=0.3
    )  # fmt: skip
    own = Counting(SHAPE, KIND, cuda.DeviceOps(DEVICE))
    attention = whole_prompts.WholePromptAttention(own, SHAPE, KIND)
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(tokens))).astype(np.int32))
    last = torch.from_numpy((lengths - (counts - 1) * 16).astype(np.int32))
    attention.plan(starts, PagedKeys(torch.from_numpy(indptr), torch.from_numpy(pages).to(DEVICE), last))
    cache = StoredPages(*stored.to(DEVICE))
    for out in (None, torch.full_like(query, float("nan")).to(DEVICE)):
        found = attention.run(query.to(DEVICE), cache, out)
        assert out is None or found is out
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)
    assert own.ran == 2 * rest


def test_prompts_have_few_lengths():
    lengths = range(2048, 8193)
    kinds = {cudnn_lengths.rounded(each) for each in lengths}
    assert len(kinds) == 17 and all(each <= cudnn_lengths.rounded(each) < each * 1.125 for each in lengths)
    assert cudnn_lengths.lengths(2048, 8192) == cudnn_lengths.lengths(2000, 8100) == sorted(kinds)
    assert cudnn_lengths.lengths(2048, 2047) == []


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (Variant(1.0, 64, None), torch.bfloat16),
        (Variant(1.0, None, 30.0), torch.bfloat16),
        (Variant(1.0, None, None, sinks=True), torch.bfloat16),
        (Variant(1.0, None, None), torch.float8_e4m3fn),
    ],
)
def test_other_layers_keep_their_kernel(kind, stored, monkeypatch):
    monkeypatch.setattr(whole_prompts, "_has_cudnn", lambda device, shape: True)
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
    device = torch.device("cuda")
    assert whole_prompts.serves(shape, Variant(1.0, None, None), torch.bfloat16, device)
    assert not whole_prompts.serves(shape, kind, stored, device)
