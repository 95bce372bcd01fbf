"""Both ways of latent attention give what its definition gives."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.attention.latent.heads import LatentHeads

HEADS, FLAT, ROTARY, VALUE, RANK, KEYS, QUERIES = 5, 8, 6, 10, 24, 19, 4


@pytest.fixture(name="layer")
def _layer():
    torch.manual_seed(0)
    heads = LatentHeads(torch.randn(HEADS, FLAT + VALUE, RANK) / RANK**0.5, FLAT)
    query, stored = torch.randn(QUERIES, HEADS, FLAT + ROTARY), torch.randn(KEYS, RANK + ROTARY)
    return heads, query, stored, reference.latent_attention(query, stored, heads.up, scale=0.4)


def test_absorbed_queries_over_the_cached_vectors_give_the_definitions_result(layer):
    heads, query, stored, expected = layer
    shared = stored[:, None]
    found = reference.attention(heads.absorb(query), shared, shared[..., :RANK], scale=0.4)
    assert expected.shape == (QUERIES, HEADS, VALUE)
    torch.testing.assert_close(heads.values(found), expected, rtol=1e-4, atol=1e-5)


def test_expanded_keys_and_values_of_some_heads_give_the_definitions_result(layer):
    heads, query, stored, expected = layer
    key, value = heads.expand(stored, slice(1, 4))
    found = reference.attention(query[:, 1:4], key, value, scale=0.4)
    torch.testing.assert_close(found, expected[:, 1:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("flat", "value", "rank", "first"), [(128, 128, 512, 171), (8, 10, 24, 15), (16, 16, 16, 0)])
def test_expanding_is_taken_from_where_it_is_fewer_operations(flat: int, value: int, rank: int, first: int):
    heads = LatentHeads(torch.empty(1, flat + value, rank), flat)
    assert heads.expands_from == first

    def operations(queries: int) -> tuple[int, int]:
        rotary = 64
        return queries * (2 * rank + rotary), rank * (flat + value) + queries * (flat + rotary + value)

    if first:
        absorbed, expanded = operations(first)
        assert expanded < absorbed
        absorbed, expanded = operations(first - 1)
        assert expanded >= absorbed
    else:
        absorbed, expanded = operations(10**6)
        assert absorbed <= expanded
