"""Bit masks forbid exactly the tokens whose bit is not set."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels.sampling.cpu_sampling import apply_token_bitmask


def expected(logits: torch.Tensor, bitmask: torch.Tensor, rows: list[int]) -> torch.Tensor:
    result = logits.clone()
    for mask, row in zip(bitmask.tolist(), rows, strict=True):
        for token in range(logits.shape[1]):
            allowed = token // 32 < len(mask) and mask[token // 32] >> (token % 32) & 1
            if not allowed:
                result[row, token] = float("-inf")
    return result


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 128])
@pytest.mark.parametrize("words", [1, 4])
@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_forbidden_tokens_become_minus_infinity_and_nothing_else_changes(width, words, rows):
    generator = torch.Generator().manual_seed(width * 8 + words)
    logits = torch.randn(3, width, generator=generator)
    count = 3 if rows is None else len(rows)
    bitmask = torch.randint(-(2**31), 2**31, (count, words), generator=generator, dtype=torch.int64).int()
    wanted = expected(logits, bitmask, rows or [0, 1, 2])
    apply_token_bitmask(logits, bitmask, None if rows is None else torch.tensor(rows))
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sign_bit_and_extreme_masks(dtype):
    logits = torch.ones(3, 32, dtype=dtype)
    apply_token_bitmask(logits, torch.tensor([[-(2**31)], [0], [-1]], dtype=torch.int32))
    assert logits[0].tolist() == [float("-inf")] * 31 + [1.0]
    assert torch.isinf(logits[1]).all()
    assert torch.equal(logits[2], torch.ones(32, dtype=dtype))
