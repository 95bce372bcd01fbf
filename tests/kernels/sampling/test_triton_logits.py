"""Kernels over rows of logits against plain torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.sampling import cpu_sampling

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.sampling.triton_logits")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 97, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_likeliest_tokens(width: int, dtype: torch.dtype):
    torch.manual_seed(width)
    logits = torch.randn(5, width).to(dtype).to(DEVICE)  # bfloat16 has ties
    logits[3] = 2.0
    largest, greedy = kernel.row_max(logits)
    wanted = logits.float().max(-1)
    assert largest.dtype == torch.float32
    torch.testing.assert_close(largest, wanted.values)
    first = [row.tolist().index(value) for row, value in zip(logits.float(), wanted.values.tolist(), strict=True)]
    assert greedy.tolist() == first


@pytest.mark.parametrize("at", [0, 4095, 4096, 8999])
def test_a_row_with_a_nan_has_no_likeliest_token_and_one_without_hope_neither(at: int):
    logits = torch.randn(3, 9000, device=DEVICE)
    logits[0, at] = float("nan")
    logits[1] = float("-inf")
    largest, greedy = kernel.row_max(logits)
    assert largest.isfinite().tolist() == [False, False, True]
    assert greedy.tolist() == [-1, -1, int(logits[2].argmax())]


@pytest.mark.parametrize("width", [31, 5000])
def test_penalties_and_counts(width: int):
    torch.manual_seed(width)
    logits, counts = torch.randn(4, width) * 3, torch.randint(0, 3, (6, width), dtype=torch.int32)
    seen = (counts > 0) | (torch.rand(6, width) < 0.3)
    rows, slots = torch.tensor([2, 0, 3]), torch.tensor([5, 1, 0])
    settings = torch.rand(3, 3) + torch.tensor([0.0, 0.0, 0.6])
    tokens = torch.randint(width, (4,))
    expected, new_counts, new_seen = logits.clone(), counts.clone(), seen.clone()
    reference.apply_penalties(expected, counts, seen, rows, slots, *settings.chunk(3, dim=1))
    reference.count_tokens(new_counts, new_seen, tokens, rows, slots)
    on = [each.to(DEVICE, copy=True) for each in (logits, counts, seen, rows, slots)]
    kernel.apply_penalties(*on, *settings.to(DEVICE).chunk(3, dim=1))  # columns of one table, as the sampler has them
    kernel.count_tokens(on[1], on[2], tokens.to(DEVICE), on[3], on[4])
    torch.testing.assert_close(on[0].cpu(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(on[1].cpu(), new_counts)
    assert torch.equal(on[2].cpu(), new_seen)
    assert int(new_counts.sum() - counts.sum()) == 3


@pytest.mark.parametrize(("width", "words"), [(31, 1), (128, 4), (100, 2), (5000, 157)])
@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_forbidden_tokens(width: int, words: int, rows: list[int] | None):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(3, width, generator=generator)
    count = 3 if rows is None else len(rows)
    bitmask = torch.randint(-(2**31), 2**31, (count, words), generator=generator, dtype=torch.int64).int()
    at = None if rows is None else torch.tensor(rows)
    on = logits.to(DEVICE, copy=True)
    cpu_sampling.apply_token_bitmask(logits, bitmask, at)
    kernel.apply_token_bitmask(on, bitmask.to(DEVICE), None if at is None else at.to(DEVICE))
    assert torch.equal(on.cpu(), logits)
