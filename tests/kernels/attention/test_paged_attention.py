"""Attention backends equal the reference over random ragged batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_worker.model.attention.backend import AttentionBatch, AttentionLayer
from sapwood_worker.model.attention.torch_native import TorchAttention
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.records.kv_layout import KVComponent, KVLayout

DIM = 8


def run(
    query_lens, prefix_lens, *, heads, kv_heads, page_size, window=None, softcap=None, sinks=None, seed=0, float8=False,
    chunked=False, order="HND",
):  # fmt: skip
    """Attends with the backend and with the reference; both [T, heads * DIM]."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    query_lens, prefix_lens = np.array(query_lens), np.array(prefix_lens)
    seq_lens = query_lens + prefix_lens
    pages_each = -(-seq_lens // page_size)
    count = int(pages_each.sum()) + 3
    kept = KVComponent((0, 1), 2, kv_heads, DIM, "float8_e4m3fn" if float8 else "float32")
    scales = KVScales((1.0, 0.5), (1.0, 4.0)) if float8 else None
    pool = DevicePool(KVLayout((kept,), page_size, order), count, torch.device("cpu"), scales)
    # What was never written must never be read.
    pool.pages[1].fill_(float("nan"))
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
    layer = AttentionLayer(1, 0.7, window=window, chunked=chunked, softcap=softcap, sinks=sinks)
    pool.destination(1, batch.cache_slots).store(key, value)
    attention = TorchAttention(pool, torch.float32)
    attention.plan(batch)
    ours = attention.attend(layer, query).view(total, -1)
    theirs = reference.paged_attention(
        query,
        *everything(pool, 1),
        torch.from_numpy(table.clip(max=count - 1)),
        torch.from_numpy(query_lens),
        torch.from_numpy(seq_lens),
        page_size,
        scale=0.7,
        window=window,
        chunked=chunked,
        softcap=softcap,
        sinks=sinks,
    )
    return ours, theirs.flatten(1)


def everything(pool: DevicePool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values by slot, [S, K, D] each."""
    return pool.read(layer, torch.arange(pool.num_pages * pool.page_size), torch.float32)


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


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("chunk", [1, 16, 300])
def test_chunks_begin_again(name, chunk):
    ours, theirs = run(*BATCHES[name], heads=4, kv_heads=2, page_size=4, window=chunk, chunked=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("float8", [False, True])
def test_the_order_within_a_page_does_not_change_a_number(order, float8):
    ours, _ = run(*BATCHES["mixed"], heads=6, kv_heads=2, page_size=16, window=37, float8=float8, order=order)
    other, _ = run(*BATCHES["mixed"], heads=6, kv_heads=2, page_size=16, window=37, float8=float8)
    assert torch.equal(ours, other)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_head_groups_page_sizes_and_softcap(heads, kv_heads, page_size, softcap):
    ours, theirs = run(
        *BATCHES["mixed"], heads=heads, kv_heads=kv_heads, page_size=page_size, window=37, softcap=softcap
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["decodes of all lengths", "mixed", "longer than a tile"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_sinks_take_part(name, softcap):
    options = {"heads": 6, "kv_heads": 2, "page_size": 4, "window": 37, "softcap": softcap}
    ours, theirs = run(*BATCHES[name], **options, sinks=torch.tensor([-1.0, 3.0, 0.5, 2.0, 0.0, 9.0]))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    without, _ = run(*BATCHES[name], **options)
    assert (ours - without).abs().max() > 0.1


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


def test_a_range_of_heads_is_one_piece_of_a_page():
    layout = KVLayout((KVComponent((0,), 2, 4, DIM, "float32"),), 16)
    pool = DevicePool(layout, 3, torch.device("cpu"))
    assert layout.page_bytes * 3 == pool.pages[0].nbytes
    pool.destination(0, torch.tensor([35])).store(torch.ones(1, 4, DIM), torch.full((1, 4, DIM), 2.0))
    assert bool((pool.key_pages(0)[2, 3] == 1.0).all() and (pool.value_pages(0)[2, 3] == 2.0).all())
    shard = layout.shard(2)
    ranks = [DevicePool(shard, 3, torch.device("cpu")) for _ in range(2)]
    for rank, theirs in enumerate(ranks):
        heads = pool.pages[0][2, :, 2 * rank : 2 * rank + 2]
        assert all(part.is_contiguous() for part in heads)
        theirs.pages[0][1] = heads
    assert torch.equal(torch.cat([each.pages[0][1] for each in ranks], 1), pool.pages[0][2])


def test_a_latent_is_read_as_key_and_as_value():
    pool = DevicePool(KVLayout((KVComponent((0,), 1, 1, DIM, "float32"),), 4), 2, torch.device("cpu"))
    latent = torch.randn(5, 1, DIM)
    pool.destination(0, torch.arange(5)).store(latent, latent)
    keys, values = everything(pool, 0)
    assert torch.equal(keys[:5], latent) and torch.equal(values[:5], latent)
