"""Chunks of a recurrence give what its steps give one by one, in float64, and states go on where they were left."""

from __future__ import annotations

import pytest
import torch

from sapwood_worker.model.layers.state.gated_delta_net import delta_rule
from sapwood_worker.model.layers.state.mamba2 import state_space
from sapwood_worker.model.layers.state.state_layer import convolve


def random(*sizes, seed):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def delta_steps(q, k, v, decay, beta, state):
    q, k, v, decay, beta, state = (each.double() for each in (q, k, v, decay, beta, state))
    outs = []
    for at in range(q.shape[1]):
        state = state * decay[:, at, :, None, None].exp()
        wrong = v[:, at] - torch.einsum("bhkv,bhk->bhv", state, k[:, at])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, at], wrong * beta[:, at, :, None])
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, at]))
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_the_delta_rule_in_chunks_is_that_of_its_steps(count):
    shape = 2, count, 3
    q, k, v = (random(*shape, size, seed=size) for size in (8, 8, 5))
    q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
    decay, beta, state = -random(*shape, seed=1).abs(), random(*shape, seed=2).sigmoid(), random(2, 3, 8, 5, seed=3)
    out, after = delta_rule(q, k, v, decay, beta, state)
    expected, last = delta_steps(q, k, v, decay, beta, state)
    assert (out - expected).abs().max() < 1e-5
    assert (after - last).abs().max() < 1e-5


@pytest.mark.parametrize("count", [1, 2, 64, 65, 200])
def test_a_state_space_in_chunks_is_that_of_its_steps(count):
    x, step, rate = random(2, count, 4, 5, seed=1), random(2, count, 4, seed=2).exp(), -random(4, seed=3).exp()
    b, c, state = random(2, count, 2, 6, seed=4), random(2, count, 2, 6, seed=5), random(2, 4, 5, 6, seed=6)
    out, after = state_space(x, step, rate, b, c, state)
    known = state.double()
    for at in range(count):
        written = torch.einsum("bhp,bhn->bhpn", x[:, at] * step[:, at, :, None], b[:, at].repeat_interleave(2, 1))
        known = known * (step[:, at].double() * rate).exp()[..., None, None] + written
        expected = torch.einsum("bhpn,bhn->bhp", known, c[:, at].repeat_interleave(2, 1).double())
        assert (out[:, at] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (after - known).abs().max() < 1e-5 * known.abs().max()


@pytest.mark.parametrize("cut", [1, 2, 5, 19])
def test_a_convolution_continues_from_its_state(cut):
    x, weight, bias = random(2, 20, 6, seed=1), random(6, 4, seed=2), random(6, seed=3)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=6)[..., :20]
    first, before = convolve(x[:, :cut], torch.zeros(2, 6, 3), weight, bias)
    second, _ = convolve(x[:, cut:], before, weight, bias)
    assert torch.allclose(torch.cat((first, second), 1), expected.transpose(1, 2), atol=1e-6)
