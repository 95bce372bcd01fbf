"""Head norms, rotation and the KV write against the reference: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.rotary_pairs import RotaryPairs

pytest.importorskip("triton", reason="Triton is not installed")
kernel = pytest.importorskip("sapwood_kernels.triton_qkv")
pages = pytest.importorskip("sapwood_kernels.attention.triton_kv_dequantise")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def empty(pages: int, size: int, kv_heads: int, dim: int, *, heads_first: bool) -> torch.Tensor:
    """Keys and values [2, pages, size, kv_heads, dim], with heads inside or outside tokens in memory."""
    if heads_first:
        return torch.zeros(2, pages, kv_heads, size, dim).transpose(2, 3)
    return torch.zeros(2, pages, size, kv_heads, dim)


@pytest.mark.parametrize(
    ("dim", "rotated", "interleaved", "norm"),
    [(24, 24, False, True), (32, 8, False, False), (24, 12, True, True), (16, 16, True, False)],
)
def test_heads_of_any_width_are_turned_in_part_or_by_neighbours(dim: int, rotated: int, interleaved: bool, norm: bool):
    torch.manual_seed(dim)
    pairs = RotaryPairs(dim, rotated, interleaved)
    slots = torch.randperm(80)[:5]
    qkv = torch.randn(5, 7 * dim)
    cos, sin = pairs.spread(*torch.randn(2, 5, rotated // 2))
    weights = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5)
    cache = empty(5, 16, 2, dim, heads_first=True)
    stored = cache.to(DEVICE, copy=True)
    on = [each.to(DEVICE) for each in (qkv, cos, sin)]
    query = kernel.norm_rope_store(
        *on, *stored, slots.to(DEVICE), num_heads=3, eps=1e-6, pairs=pairs,
        norm_weights=tuple(each.to(DEVICE) for each in weights) if norm else None,
    )  # fmt: skip
    split = qkv.view(5, -1, dim)
    expected = [split[:, :3], split[:, 3:5]]
    if norm:
        expected = [reference.rms_norm(x, weight, 1e-6) for x, weight in zip(expected, weights, strict=True)]
    expected = [reference.rope(x, cos, sin, pairs.partners()) for x in expected]
    torch.testing.assert_close(query.cpu(), expected[0], rtol=1e-5, atol=1e-5)
    reference.store_kv(expected[1], split[:, 5:], *cache, slots)
    torch.testing.assert_close(stored.cpu(), cache, rtol=1e-5, atol=1e-5)


def test_pairs_turn_as_a_rotation_does():
    head = torch.randn(1, 1, 8)
    for pairs, (one, two) in {
        RotaryPairs(8, 8): (1, 5), RotaryPairs(8, 4): (1, 3), RotaryPairs(8, 4, interleaved=True): (2, 3),
    }.items():  # fmt: skip
        angles = torch.tensor([[0.3, 1.1, 2.0, -0.4]])[:, : pairs.rotated // 2]
        turned = reference.rope(head, *pairs.spread(angles.cos(), angles.sin()), pairs.partners())[0, 0]
        before = torch.complex(head[0, 0, one], head[0, 0, two])
        after = before * torch.exp(torch.tensor(1.1j))
        torch.testing.assert_close(torch.stack((turned[one], turned[two])), torch.view_as_real(after))
        torch.testing.assert_close(turned[pairs.rotated :], head[0, 0, pairs.rotated :])
        assert pairs.are_halves == torch.equal(pairs.partners(), torch.arange(8).roll(4))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "tokens"), [(4, 2, 16, 70), (3, 1, 128, 5), (9, 3, 256, 3)])
def test_equals_the_reference(heads: int, kv_heads: int, dim: int, tokens: int, float8: bool, norm: bool):
    heads_first = norm
    torch.manual_seed(heads)
    slots = torch.randperm(80)[:tokens]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = torch.randn(2, tokens, dim // 2)
    cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    weights = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5)
    scales = (0.5, 0.004) if float8 else (1.0, 1.0)  # the second scale makes the largest values too large
    dtype = torch.float8_e4m3fn if float8 else torch.float32
    cache = empty(5, 16, kv_heads, dim, heads_first=heads_first).to(dtype)
    stored = cache.to(DEVICE, copy=True)
    on = [each.to(DEVICE) for each in (qkv, cos, sin)]
    query = kernel.norm_rope_store(
        *on, *stored, slots.to(DEVICE), num_heads=heads, eps=1e-6, scales=scales,
        norm_weights=tuple(each.to(DEVICE) for each in weights) if norm else None,
    )  # fmt: skip

    split = qkv.view(tokens, -1, dim)
    expected = [split[:, :heads], split[:, heads : heads + kv_heads]]
    if norm:
        expected = [reference.rms_norm(x, weight, 1e-6) for x, weight in zip(expected, weights, strict=True)]
    expected = [reference.rope(x, cos, sin) for x in expected]
    torch.testing.assert_close(query.cpu(), expected[0], rtol=1e-5, atol=1e-5)
    reference.store_kv(expected[1], split[:, heads + kv_heads :], *cache, slots, scales)
    if not float8:
        torch.testing.assert_close(stored.cpu(), cache, rtol=1e-5, atol=1e-5)
        return
    # A last bit of the rotation may decide which way a number is rounded; and the interpreter rounds up wrongly to powers of 2.
    near = torch.isclose(stored.cpu().float(), cache.float(), rtol=0.13, atol=1e-2)
    assert float((~near).float().mean()) < (1e-9 if DEVICE == "cuda" else 0.07)
    assert float((stored.cpu().float() != cache.float()).float().mean()) < (0.02 if DEVICE == "cuda" else 0.07)


@pytest.mark.parametrize("float8", [False, True])
def test_bfloat16_is_taken_too(float8: bool):
    qkv = torch.randn(3, 4 * 32).bfloat16()
    angles = torch.ones(3, 32).bfloat16(), torch.zeros(3, 32).bfloat16()  # no rotation
    stored = torch.zeros(2, 1, 4, 1, 32).to(torch.float8_e4m3fn if float8 else torch.bfloat16).to(DEVICE)
    slots = torch.tensor([2, 0, 3])
    on = [each.to(DEVICE) for each in (qkv, *angles)]
    query = kernel.norm_rope_store(*on, *stored, slots.to(DEVICE), num_heads=2, norm_weights=None, eps=1e-6)
    split = qkv.view(3, 4, 32)
    assert torch.equal(query.cpu(), split[:, :2])
    cache = stored.cpu().float()[:, 0]
    for nth, written in enumerate((split[:, 2:3], split[:, 3:])):
        near = torch.isclose(cache[nth, slots], written.float(), rtol=0.07 if float8 else 0.0, atol=0.01)
        assert float((~near).float().mean()) < 0.07  # of the interpreter's rounding to float8
    assert not cache[:, 1].any()


def test_pages_of_a_float8_cache_are_widened_with_their_scales():
    keys, values = torch.randn(7, 2, 4, 2, 24).to(torch.float8_e4m3fn).to(DEVICE).unbind(1)
    chosen = torch.tensor([5, 0, 3], dtype=torch.int32, device=DEVICE)
    wide = torch.full((2, 4, 4, 2, 24), 9.0, device=DEVICE)
    pages.dequantise_pages(keys, values, chosen, *wide, (2.0, 0.25))
    torch.testing.assert_close(wide[0, :3], keys.float()[chosen.long()] * 2.0)
    torch.testing.assert_close(wide[1, :3], values.float()[chosen.long()] * 0.25)
    assert bool((wide[:, 3] == 9.0).all())
