"""Decode attention that reads shared keys once against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, SharedRuns, StoredPages, Variant
from sapwood_kernels.attention.shared.items import SLOTS, cut_runs
from sapwood_kernels.ops.factory import device_ops

pytest.importorskip("triton", reason="Triton is not installed")
shared_decode = pytest.importorskip("sapwood_kernels.attention.shared_decode")
triton_shared = pytest.importorskip("sapwood_kernels.attention.shared.triton_shared")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = device_ops(DEVICE)
PAGE = 16

ONE_LEVEL = [(range(4), 0, 9)]
"""Requests that share pages, from one on, up to another."""
THREE_LEVELS = [(range(7), 0, 18), (range(3), 18, 27), (range(3, 6), 18, 34), (range(3, 5), 34, 50)]


@pytest.fixture(autouse=True)
def few_items(monkeypatch):
    """Programs without work take as long as others in the interpreter."""
    monkeypatch.setattr(shared_decode, "ITEMS", 16)


def runs_of(shared: list[tuple[range, int, int]], batch: int) -> SharedRuns:
    order = np.arange(batch)
    fields = [[members[0], len(members), begin * PAGE, end * PAGE] for members, begin, end in shared]
    return SharedRuns(order, *np.array(fields, np.int64).reshape(-1, 4).T)


def check(
    own: list[int], shared: list[tuple[range, int, int]], *, heads=4, kv_heads=2, dim=16, window=None, softcap=None,
    float8=False, sinks=False, chunked=False, padded=0, dropped_before=0,
) -> None:  # fmt: skip
    """``own``: keys of each request beyond those that it shares; ``dropped_before``: pages before it are gone."""
    torch.manual_seed(sum(own))
    batch = len(own)
    deepest = [max((end for members, _, end in shared if i in members), default=0) for i in range(batch)]
    lengths = [end * PAGE + more for end, more in zip(deepest, own, strict=True)]
    counts = [-(-length // PAGE) for length in lengths]
    total = sum(counts) + 3
    fresh = iter(torch.randperm(total).tolist())
    table = [[next(fresh) for _ in range(count)] for count in counts]
    for members, begin, end in shared:
        for i in members:
            table[i][begin:end] = table[members[0]][begin:end]
    # What was never written must never be read.
    keys = torch.full((total * PAGE, kv_heads, dim), float("nan"))
    values = keys.clone()
    scratch = next(fresh)  # of which rows that pad a graph's batch have one key
    keys[scratch * PAGE], values[scratch * PAGE] = 0.0, 0.0
    for pages, length in zip(table, lengths, strict=True):
        at = torch.arange(dropped_before * PAGE, length)
        slots = torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE
        keys[slots], values[slots] = torch.randn(2, len(at), kv_heads, dim)
    query = torch.randn(batch + padded, heads, dim)
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
        query[:batch], keys.nan_to_num(), values.nan_to_num(), wide, torch.ones(batch, dtype=torch.int64),
        torch.tensor(lengths), PAGE, scale=0.7, window=window, chunked=chunked, softcap=softcap, sinks=sink,
    )  # fmt: skip
    table += [[scratch]] * padded
    lengths += [1] * padded
    indptr = np.cumsum([0, *map(len, table)]).astype(np.int32)
    indices = torch.tensor([page for pages in table for page in pages], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    kernel = shared_decode.SharedDecodeAttention(
        batch + padded if padded else None, indices, AttentionShape(heads, kv_heads, dim, PAGE, torch.float32),
        Variant(0.7, window, softcap, sinks, chunked), OPS,
    )  # fmt: skip
    where = PagedKeys(torch.from_numpy(indptr), indices, last, runs_of(shared, batch))
    kernel.plan(torch.arange(batch + padded + 1, dtype=torch.int32), where)
    pages = [each.view(total, PAGE, kv_heads, dim).to(DEVICE) for each in stored]
    result = kernel.run(
        query.to(DEVICE), StoredPages(pages[0], pages[1], kv_scales, None if sink is None else sink.to(DEVICE))
    )
    # float8 is widened to float16, in which queries and weights are rounded too.
    rtol, atol = (2e-3, 1e-2) if float8 else (1e-4, 1e-5)
    torch.testing.assert_close(result[:batch].cpu(), expected, rtol=rtol, atol=atol)


def test_runs_that_branch_beside_requests_that_share_nothing():
    check([5, 17, 1, 64, 30, 2, 20, 90], THREE_LEVELS)


def test_rows_that_pad_a_graph_share_nothing():
    check([1, 40, 16, 7], ONE_LEVEL, padded=3)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 8), (6, 2, 24), (20, 1, 64)])
def test_heads_of_any_number_and_width(heads: int, kv_heads: int, dim: int):
    check([1, 40, 16, 70, 7], ONE_LEVEL, heads=heads, kv_heads=kv_heads, dim=dim)


@pytest.mark.slow
def test_more_requests_than_a_program_takes():
    check([3 + i for i in range(10)], [(range(10), 0, 9)], heads=16, kv_heads=1)


@pytest.mark.parametrize("window", [30, 160])
def test_a_window_hides_what_lies_before_it_whose_pages_may_be_gone(window: int):
    gone = max(0, (9 * PAGE + 1 - window) // PAGE)
    check([1, 20, 16, 7], ONE_LEVEL, window=window, dropped_before=gone)


def test_chunks_begin_again_for_each_request_by_itself():
    check([1, 20, 16, 7], ONE_LEVEL, window=150, chunked=True)  # one request is in the second chunk, three in the first


@pytest.mark.parametrize("options", [{"softcap": 1.5, "sinks": True}, {"float8": True}], ids=str)
def test_scores_are_capped_sinks_count_once_and_a_float8_cache_has_its_scales(options: dict[str, float]):
    check([1, 16, 7, 20, 3], ONE_LEVEL, **options)


def cut(shared: list[tuple[range, int, int]], batch: int, **given):
    sizes = {"page_size": PAGE, "tile": 4, "kv_heads": 2, "processors": 8, "most": 100} | given
    return cut_runs(runs_of(shared, batch), **sizes)


def read(items) -> dict[tuple[int, int], int]:
    """How often each key is read for each request."""
    found: dict[tuple[int, int], int] = {}
    for first, count, _, begin, end, *_ in items.items.tolist():
        for request in range(first, first + count):
            for key in range(begin, end):
                found[request, key] = found.get((request, key), 0) + 1
    return found


def test_every_shared_key_is_read_once_for_each_request():
    items = cut(THREE_LEVELS, 8)
    assert read(items) == {(i, key): 1 for i in range(8) for key in range(items.starts[i])}
    assert items.starts.tolist() == [page * PAGE for page in (27, 27, 27, 50, 50, 34, 18, 0)]
    assert items.counts.max() <= SLOTS
    for first, count, *_, slot, _, _ in items.items.tolist():
        assert (items.counts[first : first + count] > slot).all()


def test_few_long_runs_are_cut_finer_than_many():
    one = cut([(range(4), 0, 400)], 4, processors=64).items
    many = cut([(range(4 * i, 4 * i + 4), 0, 400) for i in range(16)], 64, processors=64).items
    assert len(one) == SLOTS > len(many) / 16


def test_what_finds_no_room_is_left_to_its_requests_with_what_hangs_on_it():
    items = cut(THREE_LEVELS, 8, most=3, tile=8)
    assert len(items.items) <= 3
    assert read(items) == {(i, key): 1 for i in range(8) for key in range(items.starts[i])}
    none = cut(THREE_LEVELS, 8, slots=0)
    assert not len(none.items) and not none.starts.any() and not none.counts.any()
