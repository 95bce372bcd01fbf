"""Attention backends equal the reference over random ragged batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer
from sapwood_worker.model.attention.torch_native import TorchAttention
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales, page_bytes

DIM = 8


def run(query_lens, prefix_lens, *, heads, kv_heads, page_size, window=None, softcap=None, seed=0, float8=False):
    """Attends with the backend and with the reference; both [T, heads * DIM]."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    query_lens, prefix_lens = np.array(query_lens), np.array(prefix_lens)
    seq_lens = query_lens + prefix_lens
    pages_each = -(-seq_lens // page_size)
    count = int(pages_each.sum()) + 3
    pool = DevicePool(
        num_layers=2,
        num_pages=count,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=DIM,
        dtype=torch.float8_e4m3fn if float8 else torch.float32,
        device=torch.device("cpu"),
        scales=KVScales((1.0, 0.5), (1.0, 4.0)) if float8 else None,
    )
    # What was never written must never be read.
    pool.key_slots[1].fill_(float("nan"))
    pool.value_slots[1].fill_(float("nan"))
    order = rng.permutation(count)
    table = np.full((len(query_lens), int(pages_each.max()) + 1), 10**8, np.int32)
    used = 0
    slots, written = [], []
    for i, pages in enumerate(pages_each):
        table[i, :pages] = order[used : used + pages]
        used += pages
        at = np.arange(seq_lens[i])
        all_slots = table[i, at // page_size].astype(np.int64) * page_size + at % page_size
        written.append(all_slots[: prefix_lens[i]])
        slots.append(all_slots[prefix_lens[i] :])
    old = torch.from_numpy(np.concatenate(written))
    pool.destination(1, old).store(*torch.randn(2, len(old), kv_heads, DIM, generator=generator))
    total = int(query_lens.sum())
    query = torch.randn(total, heads, DIM, generator=generator)
    key, value = torch.randn(2, total, kv_heads, DIM, generator=generator)
    batch = AttentionBatch(
        query_starts=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int64),
        seq_lens=seq_lens.astype(np.int64),
        page_table=table,
        cache_slots=torch.from_numpy(np.concatenate(slots)),
    )
    layer = AttentionLayer(1, 0.7, window=window, softcap=softcap)
    pool.destination(1, batch.cache_slots).store(key, value)
    attention = TorchAttention(pool, torch.float32)
    attention.plan(batch)
    ours = attention.attend(layer, query).view(total, -1)
    theirs = reference.paged_attention(
        query,
        *pool.read(1, torch.arange(count * page_size), torch.float32),
        torch.from_numpy(table.clip(max=count - 1)),
        torch.from_numpy(query_lens),
        torch.from_numpy(seq_lens),
        page_size,
        scale=0.7,
        window=window,
        softcap=softcap,
    )
    return ours, theirs.flatten(1)


BATCHES = {
    "one decode": ([1], [13]),
    "first token": ([1], [0]),
    "decodes of like length": ([1] * 5, [9, 9, 9, 9, 9]),
    "decodes of all lengths": ([1] * 7, [0, 1, 2, 17, 100, 255, 256]),
    "whole prompts": ([20, 3, 33, 31, 32], [0] * 5),
    "chunks over a prefix": ([8, 40, 7], [64, 3, 90]),
    "mixed": ([1, 50, 1, 2, 1, 33], [80, 0, 5, 31, 200, 12]),
    "longer than a tile": ([1, 600, 257], [3, 70, 0]),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [None, 1, 16, 300])
def test_ragged_batches(name, window):
    ours, theirs = run(*BATCHES[name], heads=4, kv_heads=2, page_size=4, window=window)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_head_groups_page_sizes_and_softcap(heads, kv_heads, page_size, softcap):
    ours, theirs = run(
        *BATCHES["mixed"], heads=heads, kv_heads=kv_heads, page_size=page_size, window=37, softcap=softcap
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["decodes of all lengths", "mixed"])
def test_a_cache_of_float8(name):
    ours, theirs = run(*BATCHES[name], heads=4, kv_heads=2, page_size=4, float8=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    query_lens = np.where(rng.random(count) < 0.5, 1, rng.integers(1, 80, count))
    ours, theirs = run(
        query_lens, rng.integers(0, 120, count), heads=4, kv_heads=2, page_size=int(rng.choice([1, 3, 16])), seed=seed
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_pool_pages_are_views_of_its_slots():
    pool = DevicePool(
        num_layers=1,
        num_pages=3,
        page_size=4,
        num_kv_heads=2,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.key_slots[0][6] = 5.0
    pool.value_slots[0][11] = 6.0
    assert pool.key_pages(0).shape == (3, 4, 2, DIM)
    assert bool((pool.key_pages(0)[1, 2] == 5.0).all())
    assert bool((pool.value_pages(0)[2, 3] == 6.0).all())
    size = page_bytes(num_layers=1, page_size=4, num_kv_heads=2, head_dim=DIM, dtype=torch.float32)
    assert size * 3 == pool.key_slots[0].nbytes + pool.value_slots[0].nbytes
