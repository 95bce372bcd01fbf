"""Attention of ragged chunks of prompts against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.attention.triton_prefill")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(
    query_lens: list[int], prefix_lens: list[int], *, heads=4, kv_heads=2, dim=16, page_size=16, window=None, softcap=None,
    float8=False, heads_first=False, sinks=False, chunked=False, dtype=torch.float32,
) -> None:  # fmt: skip
    torch.manual_seed(sum(query_lens))
    queries, lengths = np.array(query_lens), np.array(query_lens) + np.array(prefix_lens)
    counts = -(-lengths // page_size)
    total = int(counts.sum()) + 3
    # What was never written must never be read.
    keys = torch.full((total * page_size, kv_heads, dim), float("nan"))
    values = keys.clone()
    table = np.zeros((len(counts), int(counts.max())), np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.random.default_rng(0).permutation(total)[
        : int(counts.sum())
    ]
    for pages, length in zip(table, lengths, strict=True):
        at = np.arange(length)
        slots = torch.from_numpy(pages[at // page_size] * page_size + at % page_size)
        keys[slots], values[slots] = torch.randn(2, int(length), kv_heads, dim).to(dtype).float()
    query = torch.randn(int(queries.sum()), heads, dim).to(dtype)
    sink = torch.randn(heads) * 3 if sinks else None
    kv_scales = (0.5, 4.0) if float8 else (1.0, 1.0)
    stored = [keys.to(dtype), values.to(dtype)]
    if float8:
        stored = [reference.quantise(each, scale) for each, scale in zip((keys, values), kv_scales, strict=True)]
        keys, values = [reference.dequantise(each, scale) for each, scale in zip(stored, kv_scales, strict=True)]
    expected = reference.paged_attention(
        query.float(), keys, values, torch.from_numpy(table), torch.from_numpy(queries), torch.from_numpy(lengths), page_size,
        scale=0.7, window=window, chunked=chunked, softcap=softcap, sinks=sink,
    )  # fmt: skip
    stored = [each.view(total, page_size, kv_heads, dim).to(DEVICE) for each in stored]
    if heads_first:
        stored = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in stored]
    tiles = kernel.cut_tiles(queries, lengths, kernel.tile_tokens(heads // kv_heads, dim, dtype))
    used = table[np.arange(table.shape[1]) < counts[:, None]]
    plan = [tiles, *(np.concatenate(([0], np.cumsum(each))) for each in (queries, counts)), used, lengths]
    ints = [torch.from_numpy(each.astype(np.int32)).to(DEVICE) for each in plan]
    result = kernel.prefill_attention(
        query.to(DEVICE), *stored, *ints, scale=0.7, window=window, chunked=chunked, softcap=softcap,
        kv_scales=kv_scales, sinks=None if sink is None else sink.to(DEVICE),
    )  # fmt: skip
    error = float((result.cpu().float() - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 and not float8 else 0.01)


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens"),
    [([1], [0]), ([3], [130]), ([70, 1, 5], [0, 40, 17])],
    ids=["first token", "end of a long one", "ragged"],
)
def test_equals_the_reference(query_lens: list[int], prefix_lens: list[int]):
    check(query_lens, prefix_lens)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (20, 1)])
def test_groups_of_query_heads_of_any_size(heads: int, kv_heads: int):
    check([40, 5], [0, 30], heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("dim", "page_size"), [(8, 1), (24, 7)])
def test_heads_of_any_width_and_pages_of_any_size(dim: int, page_size: int):
    check([20, 5], [0, 30], dim=dim, page_size=page_size)


@pytest.mark.parametrize("window", [1, 20])
def test_a_window_hides_what_lies_before_it(window: int):
    check([40, 5], [0, 100], window=window)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_chunks_begin_again(window: int):
    check([70, 5, 1], [0, 100, 63], window=window, chunked=True)


def test_scores_are_capped():
    check([30, 3], [0, 50], softcap=1.5)


@pytest.mark.parametrize("window", [None, 20])
def test_a_cache_of_float8_is_read_with_its_scales(window: int | None):
    check([30, 3], [0, 50], float8=True, window=window)


def test_heads_may_lie_outside_tokens():
    check([30, 3], [0, 50], heads_first=True)


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"heads": 6, "kv_heads": 2, "window": 20}], ids=str)
def test_sinks_take_part(options: dict[str, float]):
    check([70, 1, 5], [0, 40, 17], sinks=True, **options)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("float8", [False, True])
def test_on_a_gpu_shapes_of_real_models(dim: int, dtype: torch.dtype, window: int | None, float8: bool):
    check(
        [900, 17, 300, 1], [0, 1500, 33, 200], heads=8, kv_heads=2, dim=dim, dtype=dtype, window=window, float8=float8
    )


def test_tiles_cover_every_token_once_and_the_longest_come_first():
    queries, lengths = np.array([5, 130, 1]), np.array([300, 130, 1])
    tiles = kernel.cut_tiles(queries, lengths, 64)
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (1, 0), (1, 64), (1, 128), (2, 0)]
    seen = [int(lengths[request] - queries[request]) + first for request, first in tiles.tolist()]
    assert seen == sorted(seen, reverse=True)
