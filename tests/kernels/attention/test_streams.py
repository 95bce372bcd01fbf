"""Decode attention by programs that share requests out in equal parts, against the reference: on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from sapwood_kernels.attention.latent import triton_stream as latent_stream

DEVICE, DTYPE, PAGE = torch.device("cuda"), torch.bfloat16, 16
LENGTHS = [[1], [16, 1, 33], [700] * 9, [5000, 3, 31, 32, 64, 65], [1 + 61 * i % 500 for i in range(300)]]


def placed(lengths: list[int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """First pages, pages and lengths on the device, each request's pages, and for which keys nothing was written."""
    counts = torch.tensor([-(-length // PAGE) for length in lengths])
    pages = torch.randperm(int(counts.sum()))
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    unwritten = torch.zeros(len(pages), PAGE, dtype=torch.bool)
    for i, length in enumerate(lengths):
        unwritten[pages[indptr[i + 1] - 1], (length - 1) % PAGE + 1 :] = True
    ints = [each.to(DEVICE, torch.int32) for each in (indptr, pages, torch.tensor(lengths))]
    return ints, pages, unwritten


def check(run: Callable[[Tensor], Tensor], programs: int, expected: Tensor) -> None:
    flags = torch.zeros(programs, dtype=torch.int32, device=DEVICE)
    for _ in range(3):  # each clears the flags for the next
        found = run(flags).float().cpu()
        assert float((found - expected).norm() / expected.norm()) < 0.01
        assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
        assert not flags.any()


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("heads", [16, 5])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} requests")
def test_latent_heads(lengths: list[int], heads: int, programs: int) -> None:
    torch.manual_seed(len(lengths))
    ints, pages, unwritten = placed(lengths)
    stored = torch.randn(len(pages), PAGE, 1, 576).to(DTYPE)
    stored[unwritten] = float("nan")
    query = torch.randn(len(lengths), heads, 576).to(DTYPE)
    expected, at = [], 0
    for i, length in enumerate(lengths):
        count = -(-length // PAGE)
        vectors = stored[pages[at : at + count]].flatten(0, 1)[:length].float()
        expected.append(reference.attention(query[i : i + 1].float(), vectors, vectors[..., :512], scale=0.05))
        at += count
    asked, vectors = query.to(DEVICE), stored.to(DEVICE)
    check(
        lambda flags: latent_stream.latent_stream(asked, vectors, 512, *ints, flags, scale=0.05),
        programs,
        torch.cat(expected),
    )
