"""Requests attended to by one launch of torch's flash attention, which is a GPU's alone."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels.attention.latent.ragged import Ragged, ragged_attention, serves
from sapwood_kernels.ops.factory import device_ops


def test_a_cpu_is_not_served():
    assert not serves(torch.zeros(2, 1, 64, dtype=torch.bfloat16))


def test_requests_lie_one_after_the_other():
    at = Ragged.of([3, 1], [5, 7], device_ops("cpu"))
    assert (at.queries.tolist(), at.keys.tolist()) == ([0, 3, 4], [0, 5, 12])
    assert (at.most_queries, at.most_keys) == (3, 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [96, 192])
def test_each_request_sees_its_own_keys_up_to_its_tokens(dim):
    tokens, keys = [70, 1, 200, 3], [70, 90, 330, 1100]
    parts = [torch.randn(sum(many), 3, dim, device="cuda").bfloat16() for many in (tokens, keys, keys)]
    assert serves(parts[0])
    found = ragged_attention(*parts, Ragged.of(tokens, keys, device_ops("cuda")), dim**-0.5).float()
    query, key, value = (each.float() for each in parts)
    start = end = 0
    for count, seen in zip(tokens, keys, strict=True):
        own, own_keys = slice(start, start + count), slice(end, end + seen)
        scores = torch.einsum("thd,mhd->htm", query[own], key[own_keys]) * dim**-0.5
        hidden = torch.ones(count, seen, dtype=torch.bool, device="cuda").triu(seen - count + 1)
        wanted = torch.einsum("htm,mhd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value[own_keys])
        assert float((found[own] - wanted).abs().max()) <= 0.02
        start, end = start + count, end + seen
