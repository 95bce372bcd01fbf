"""Split-KV decode attention against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.attention.triton_decode")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(
    lengths: list[int], *, heads=4, kv_heads=2, dim=16, page_size=16, splits=4, least=1, window=None, softcap=None,
    float8=False, heads_first=False, sinks=False, chunked=False,
) -> None:  # fmt: skip
    torch.manual_seed(sum(lengths))
    batch = len(lengths)
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts) + 3
    order = torch.randperm(total)
    table = torch.zeros(batch, max(counts), dtype=torch.int64)
    # What was never written must never be read.
    keys = torch.full((total * page_size, kv_heads, dim), float("nan"))
    values = keys.clone()
    indptr, pages = [0], []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[len(pages) : len(pages) + count]
        table[i, :count] = mine
        at = torch.arange(length)
        slots = mine[at // page_size] * page_size + at % page_size
        keys[slots], values[slots] = torch.randn(2, length, kv_heads, dim)
        pages += mine.tolist()
        indptr.append(len(pages))
    query = torch.randn(batch, heads, dim)
    sink = torch.randn(heads) * 3 if sinks else None
    kv_scales = (0.5, 4.0) if float8 else (1.0, 1.0)
    stored = [keys, values]
    if float8:
        stored = [reference.quantise(each, scale) for each, scale in zip(stored, kv_scales, strict=True)]
        keys, values = [reference.dequantise(each, scale) for each, scale in zip(stored, kv_scales, strict=True)]
    expected = reference.paged_attention(
        query, keys, values, table, torch.ones(batch, dtype=torch.int64), torch.tensor(lengths), page_size,
        scale=0.7, window=window, chunked=chunked, softcap=softcap, sinks=sink,
    )  # fmt: skip
    stored = [each.view(total, page_size, kv_heads, dim).to(DEVICE) for each in stored]
    if heads_first:
        stored = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in stored]
    ints = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (indptr, pages, lengths)]
    result = kernel.decode_attention(
        query.to(DEVICE), *stored, *ints, splits=splits, least=least, scale=0.7, window=window, chunked=chunked,
        softcap=softcap, sinks=None if sink is None else sink.to(DEVICE), kv_scales=kv_scales,
    )  # fmt: skip
    # float8 is widened to float16, in which queries and weights are rounded too.
    rtol, atol = (2e-3, 1e-2) if float8 else (1e-4, 1e-5)
    torch.testing.assert_close(result.cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [([1], 16), ([300], 1), ([300], 16), ([1, 17, 64, 65, 130], 1), ([1, 17, 64, 65, 130], 2)],
    ids=str,
)
def test_equals_the_reference_however_the_keys_are_split(lengths: list[int], splits: int):
    check(lengths, splits=splits)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 1), (20, 1)])
def test_groups_of_query_heads_of_any_size(heads: int, kv_heads: int):
    check([70, 5], heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("dim", [8, 24, 64])
def test_heads_of_any_width(dim: int):
    check([70, 5], dim=dim)


@pytest.mark.parametrize("page_size", [1, 7, 128])
def test_pages_of_any_size(page_size: int):
    check([70, 5], page_size=page_size)


@pytest.mark.parametrize("float8", [False, True])
def test_heads_may_lie_outside_tokens(float8: bool):
    check([70, 5], float8=float8, heads_first=True)


@pytest.mark.parametrize("window", [1, 20, 64, 500])
def test_a_window_hides_what_lies_before_it(window: int):
    check([1, 64, 150], window=window)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_chunks_begin_again(window: int):
    check([1, 64, 65, 150], window=window, chunked=True)


def test_scores_are_capped():
    check([90, 3], softcap=1.5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.5, "float8": True}, {"heads": 3, "kv_heads": 1, "window": 70}], ids=str
)
def test_a_sink_takes_part_once_however_the_keys_are_split(splits: int, options: dict[str, float]):
    check([1, 90, 300], splits=splits, sinks=True, **options)


@pytest.mark.parametrize("splits", [1, 8])
def test_a_cache_of_float8_is_read_with_its_scales(splits: int):
    check([1, 70, 300], splits=splits, float8=True)


@pytest.mark.parametrize(
    "shape",
    [
        {"dim": 80, "window": 40},
        {"dim": 128, "heads": 8, "page_size": 4},
        {"dim": 256, "heads": 20, "kv_heads": 1, "softcap": 1.5},
    ],
    ids=str,
)
def test_a_cache_of_float8_with_heads_of_any_size(shape: dict[str, float]):
    check([1, 5, 130], float8=True, **shape)


@pytest.mark.parametrize("window", [None, 100])
def test_only_long_requests_are_split_where_there_are_many(window: int | None):
    check([1, 63, 64, 130, 700], splits=8, least=64, window=window)


def test_few_requests_are_split_more_than_many():
    plans = [kernel.num_splits(batch, 8, 132) for batch in (1, 4, 8, 64, 512)]
    shares = [-(-1100 // min(splits, max(1, 1100 // least))) for splits, least in plans]
    assert shares == sorted(shares)
    assert plans[0][0] * 8 >= 132
    assert shares[-1] >= 512


@pytest.mark.parametrize(("batch", "kv_heads"), [(4, 4), (8, 4), (4, 8)])
def test_few_requests_fill_the_chip_at_most_twice(batch: int, kv_heads: int):
    splits, least = kernel.num_splits(batch, kv_heads, 132)
    assert least == 1
    assert 132 <= splits * batch * kv_heads <= 2 * 132
