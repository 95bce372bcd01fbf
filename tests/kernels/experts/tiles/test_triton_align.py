"""Tokens sorted by expert into whole tiles, on a GPU or interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
triton_align = pytest.importorskip("sapwood_kernels.experts.tiles.triton_align")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = 6


def made(tokens, chosen):
    """Each token's experts, of which none is expert 4."""
    generator = torch.Generator().manual_seed(tokens)
    among = torch.tensor([each for each in range(EXPERTS) if each != 4])
    return torch.stack([among[torch.randperm(5, generator=generator)[:chosen]] for _ in range(tokens)]).to(DEVICE)


@pytest.mark.parametrize("height", [16, 32])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 2), (7, 5), (90, 3)])
def test_each_pair_has_one_place_in_a_tile_of_its_expert(tokens, chosen, height):
    ids = made(tokens, chosen)
    tiles = triton_align.align(ids, EXPERTS, height)
    places = tiles.places.view(len(tiles.experts), height).tolist()
    pairs = ids.flatten().tolist()
    used = [(expert, row) for expert, row in zip(tiles.experts.tolist(), places, strict=True) if expert < EXPERTS]
    assert sorted(pair for _, row in used for pair in row if pair < len(pairs)) == list(range(len(pairs)))
    for expert, row in used:
        assert {pairs[pair] for pair in row if pair < len(pairs)} == {expert}


@pytest.mark.parametrize(("tokens", "chosen"), [(33, 5), (90, 3)])
def test_many_pairs_are_sorted_in_parts_and_know_their_places(tokens, chosen, monkeypatch):
    monkeypatch.setattr(triton_align, "_BLOCK", 128)
    ids = made(tokens, chosen)
    ids[::7, 0] = EXPERTS  # which is not here
    tiles = triton_align.align(ids, EXPERTS, 16)
    pairs, here = ids.flatten(), (ids.flatten() < EXPERTS).nonzero().flatten()
    assert torch.equal(tiles.places[tiles.where[here].long()].long(), here)
    assert torch.equal(tiles.experts[tiles.where[here].long() // 16].long(), pairs[here].long())
    used = tiles.places.view(-1, 16)[tiles.experts < EXPERTS]
    assert int((used < len(pairs)).sum()) == len(here) and (used[used >= len(pairs)] == len(pairs)).all()
    sizes = [int((pairs == expert).sum()) for expert in range(EXPERTS)]
    assert len(used) == sum(-(-size // 16) for size in sizes), "no tile is empty"


def test_shapes_do_not_depend_on_what_is_chosen():
    alike = torch.zeros(40, 2, dtype=torch.int64, device=DEVICE)
    spread = torch.arange(80, device=DEVICE).view(40, 2) % EXPERTS
    shapes = [
        (len(each.places), len(each.experts))
        for each in (triton_align.align(ids, EXPERTS, 16) for ids in (alike, spread))
    ]
    assert shapes[0] == shapes[1]
