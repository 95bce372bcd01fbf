"""The CPU forms of the kernels equal their references."""

from __future__ import annotations

import pytest
import torch

from sapwood_kernels import cpu, reference


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 64), (5, 640), (3, 4, 16)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm(shape, size):
    x, weight = noise(*shape) * size, noise(*shape[1:], seed=1)
    torch.testing.assert_close(cpu.RmsNorm(weight, 1e-6)(x), reference.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-5)


def test_rms_norm_of_zeros_is_zero():
    assert not cpu.RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x, weight = noise(4, 256).bfloat16(), noise(256, seed=1)
    exact = reference.rms_norm(x.double().float(), weight, 1e-6)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), exact.bfloat16())


@pytest.mark.parametrize("tokens", [1, 7])
def test_rope(tokens):
    x, angles = noise(tokens, 5, 16), noise(tokens, 8, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    expected = reference.rope(x, cos, sin)
    torch.testing.assert_close(cpu.rope(x, cos[:, None], sin[:, None]), expected)
    # The definition: the pair (i, i + D/2) turns by its angle.
    pairs = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(expected, torch.cat((pairs.real, pairs.imag), -1))


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_leave_their_input(name):
    x = noise(6, 64)
    before = x.clone()
    torch.testing.assert_close(getattr(cpu, name)(x), getattr(reference, name)(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear(rows, bias):
    weight, x = noise(48, 40), noise(rows, 40, seed=1)
    offset = noise(48, seed=2) if bias else None
    assert cpu.can_pack(weight)
    torch.testing.assert_close(
        cpu.PackedLinear(weight, offset)(x), torch.nn.functional.linear(x, weight, offset), rtol=1e-5, atol=1e-5
    )


def test_only_float32_is_packed():
    assert not cpu.can_pack(torch.zeros(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("heads_first", [False, True])
def test_store_kv_writes_only_the_given_slots(heads_first):
    keys, values = torch.zeros(2, 5, 2, 2, 4).transpose(2, 3) if heads_first else torch.zeros(2, 5, 2, 2, 4)
    key, value = noise(3, 2, 4), noise(3, 2, 4, seed=1)
    slots = torch.tensor([7, 0, 4])
    reference.store_kv(key, value, keys, values, slots)
    untouched = [i for i in range(10) if i not in (7, 0, 4)]
    for pages, wanted in ((keys, key), (values, value)):
        written = pages.reshape(10, 2, 4)
        assert torch.equal(written[slots], wanted)
        assert not written[untouched].any()
