"""Absorbed decode of latent attention against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.attention.triton_latent")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(lengths: list[int], *, heads=4, rank=24, rotary=8, splits=4, least=1, page_size=16, float8=False) -> None:
    torch.manual_seed(sum(lengths))
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3)
    # What was never written must never be read.
    stored = torch.full((len(order), page_size, 1, rank + rotary), float("nan"))
    query = torch.randn(len(lengths), heads, rank + rotary)
    scale, expected, indptr = 0.5 if float8 else 1.0, [], [0]
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine, at = order[indptr[-1] : indptr[-1] + count], torch.arange(length)
        vectors = torch.randn(length, 1, rank + rotary)
        if float8:
            vectors = reference.dequantise(reference.quantise(vectors, scale), scale)
        stored[mine[at // page_size], at % page_size] = vectors
        expected.append(reference.attention(query[i : i + 1], vectors, vectors[..., :rank], scale=0.3))
        indptr.append(indptr[-1] + count)
    if float8:
        stored = reference.quantise(stored, scale)
    ints = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (indptr, order.tolist(), lengths)]
    found = kernel.latent_decode(
        query.to(DEVICE), stored.to(DEVICE), rank, *ints, splits=splits, least=least, scale=0.3, kv_scale=scale
    )
    # float8 is widened to float16, in which queries and weights are rounded too.
    rtol, atol = (2e-3, 1e-2) if float8 else (1e-4, 1e-5)
    torch.testing.assert_close(found.cpu(), torch.cat(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("lengths", "splits"), [([1], 16), ([300], 1), ([1, 17, 64, 65, 130], 4)], ids=str)
def test_equals_the_reference_however_the_keys_are_split(lengths: list[int], splits: int):
    check(lengths, splits=splits)


@pytest.mark.parametrize(("heads", "rank", "rotary"), [(1, 16, 16), (20, 40, 10), (33, 8, 4)])
def test_heads_and_vectors_of_any_size(heads: int, rank: int, rotary: int):
    check([70, 5], heads=heads, rank=rank, rotary=rotary)


def test_short_stretches_are_not_split_further():
    check([5, 40, 90], least=32)


def test_a_float8_cache_is_scaled():
    check([70, 5], float8=True)
