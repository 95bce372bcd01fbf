"""Steps of one token a row against the recurrences in float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sapwood_kernels.state import reference
from sapwood_kernels.state.contracts import DeltaShape, DeltaWeights, Slots, SpaceShape

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("sapwood_kernels.state.triton_steps").TritonStateSteps
norms = pytest.importorskip("sapwood_kernels.state.triton_gated_norm")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [4, -1, 0, 2]
"""The slots of the rows; the second row is padding."""


def draw(*sizes: int, seed: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same in float32 on the device."""
    return [each.float().to(DEVICE) for each in tensors]


class Checked:
    """Slots whose numbers before and after a step are known in float64.

    Args:
        numbers: Numbers of a slot.
    """

    def __init__(self, numbers: int) -> None:
        self.before = draw(5, numbers, seed=numbers)
        self.slots = Slots(*on(self.before), torch.tensor(ROWS, device=DEVICE))
        self.after = self.before.clone()

    def assert_equal(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Asserts that a step returned what is expected of each row, zeros for padding, and left ``after`` in the slots."""
        expected = expected.clone()
        expected[1] = 0.0
        assert torch.allclose(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(self.slots.states.double().cpu(), self.after, rtol=1e-5, atol=1e-5)
        untouched = [slot for slot in range(5) if slot not in ROWS]
        assert torch.equal(self.slots.states[untouched].cpu(), self.before[untouched].float())

    def convolved(self, row: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The convolution of a row's inputs [C], whose window lies first in its slot; moves the window."""
        window = self.before[ROWS[row], : weight.shape[0] * (weight.shape[1] - 1)].view(len(weight), -1)
        every = torch.cat((window, x[:, None]), 1)
        self.after[ROWS[row], : window.numel()] = every[:, 1:].flatten()
        out = (every * weight).sum(1)
        return out if bias is None else out + bias


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(6, 4), (300, 3), (64, 2)])
def test_a_convolution_step_is_that_of_its_window(channels, taps, biased):
    weight, bias = draw(channels, taps, seed=1), draw(channels, seed=2) if biased else None
    checked, x = Checked(channels * (taps - 1) + 5), draw(4, channels, seed=3)
    wide = torch.cat((draw(4, 8, seed=4), x), 1)
    out = kernels.convolve(on(wide)[0][:, 8:], checked.slots, *on(weight), None if bias is None else on(bias)[0])
    rows = [F.silu(checked.convolved(row, x[row], weight, bias)) if ROWS[row] >= 0 else x[row] for row in range(4)]
    checked.assert_equal(out, torch.stack(rows))


@pytest.mark.parametrize(("channels", "taps"), [(6, 4), (300, 3)])
def test_a_gated_convolution_step_multiplies_before_and_behind(channels, taps):
    weight, bias, inputs = draw(channels, taps, seed=1), draw(channels, seed=2), draw(4, 3 * channels, seed=3)
    checked = Checked(channels * (taps - 1))
    out = kernels.convolve_gated(*on(inputs), checked.slots, *on(weight, bias))
    b, c, x = inputs.chunk(3, 1)
    rows = [
        c[row] * checked.convolved(row, b[row] * x[row], weight, bias) if ROWS[row] >= 0 else x[row] for row in range(4)
    ]
    checked.assert_equal(out, torch.stack(rows))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("heads", "shared", "key_dim", "value_dim", "taps"), [(2, 2, 8, 12, 4), (1, 1, 16, 16, 2), (1, 3, 128, 128, 4)]
)
def test_a_step_of_the_delta_net_is_its_recurrence(heads, shared, key_dim, value_dim, taps, joined):
    keys, values, all_values = heads * key_dim, heads * shared * value_dim, heads * shared
    channels = 2 * keys + values
    weights = draw(channels, taps, seed=1), draw(all_values, seed=2), draw(all_values, seed=3), draw(value_dim, seed=4)
    convolution, decay, bias, norm = weights
    q, k, v, z = (draw(4, heads, width, seed=width) for width in (key_dim, key_dim + 1, shared * value_dim, 999))
    k, z = k[..., :key_dim], z[..., : shared * value_dim]
    b, a = draw(2, 4, heads, shared, seed=6)
    if joined:
        inputs, factors = torch.cat((q, k, v, z), 2).flatten(1), torch.cat((b, a), 2).flatten(1)
    else:
        inputs = torch.cat([each.flatten(1) for each in (q, k, v, z)], 1)
        factors = torch.cat((b.flatten(1), a.flatten(1)), 1)
    checked = Checked(channels * (taps - 1) + all_values * key_dim * value_dim)
    shape = DeltaShape(heads, shared, key_dim, value_dim, taps, joined, 1e-6)
    out = kernels.delta(*on(inputs, factors), checked.slots, DeltaWeights(*on(*weights)), shape)
    kept, expected = channels * (taps - 1), torch.zeros(4, values, dtype=torch.float64)
    for row, slot in enumerate(ROWS):
        if slot < 0:
            continue
        x = torch.cat([each[row].flatten() for each in (q, k, v)])
        mixed = F.silu(checked.convolved(row, x, convolution, None))
        query, key, value = mixed.split([keys, keys, values])
        query, key = (each.view(heads, key_dim).repeat_interleave(shared, 0) for each in (query, key))
        query, key = (each * torch.rsqrt(each.square().sum(1, keepdim=True) + 1e-6) for each in (query, key))
        state = checked.before[slot, kept:].view(all_values, key_dim, value_dim)
        left = torch.exp(-decay.exp() * F.softplus(a[row].flatten() + bias))[:, None, None]
        known = torch.einsum("hkv,hk->hv", left * state, key)
        change = b[row].flatten().sigmoid()[:, None] * (value.view(all_values, -1) - known)
        state = left * state + key[:, :, None] * change[:, None]
        checked.after[slot, kept:] = state.flatten()
        found = torch.einsum("hkv,hk->hv", state, query * key_dim**-0.5)
        expected[row] = reference_norm(found.view(1, -1), z[row].reshape(1, -1), norm, all_values)[0]
    checked.assert_equal(out, expected)


def reference_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    parts = x.view(len(x), groups, -1)
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-6) * weight.view(-1, parts.shape[2])
    return normed.view_as(x) * F.silu(gate)


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "size"), [(6, 2, 16, 10), (2, 1, 64, 128), (4, 4, 24, 256), (2, 2, 3, 8192)]
)
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 1.2)])
def test_a_step_of_a_state_space_is_its_recurrence(heads, groups, dim, size, limits):
    inner, offset = heads * dim, 12
    inputs, step = draw(4, inner + 2 * groups * size, seed=1), 30.0 * draw(4, heads, seed=2)
    decay, bias, skip = draw(3, heads, seed=3)
    checked = Checked(offset + inner * size)
    shape = SpaceShape(heads, groups, dim, size)
    out = kernels.space(*on(inputs, step), checked.slots, offset, *on(decay, bias, skip), limits, shape)
    x, b, c = inputs.split([inner, groups * size, groups * size], 1)
    expected = torch.zeros(4, inner, dtype=torch.float64)
    for row, slot in enumerate(ROWS):
        if slot < 0:
            continue
        moved = F.softplus(step[row].float().double() + bias).clamp(*limits)[:, None, None]
        own = x[row].view(heads, dim, 1)
        read, shown = (each[row].view(groups, 1, size).repeat_interleave(heads // groups, 0) for each in (b, c))
        state = checked.before[slot, offset:].view(heads, dim, size)
        state = torch.exp(-decay.exp()[:, None, None] * moved) * state + moved * own * read
        checked.after[slot, offset:] = state.flatten()
        expected[row] = ((state * shown).sum(2) + skip[:, None] * own[..., 0]).flatten()
    scale = expected.abs().max()
    checked.assert_equal(out / scale, expected / scale)


@pytest.mark.parametrize(("heads", "dim"), [(3, 12), (2, 128)])
def test_a_step_of_decaying_linear_attention_is_its_recurrence(heads, dim):
    qkv, rates = draw(4, heads * 3 * dim, seed=1), -draw(heads, seed=2).abs()
    checked = Checked(heads * dim * dim)
    out = kernels.linear(*on(qkv), checked.slots, *on(rates), SpaceShape(heads, heads, dim, dim))
    q, k, v = F.silu(qkv).view(4, heads, 3 * dim).chunk(3, 2)
    expected = torch.zeros(4, heads * dim, dtype=torch.float64)
    for row, slot in enumerate(ROWS):
        if slot >= 0:
            state = rates.exp()[:, None, None] * checked.before[slot].view(heads, dim, dim)
            state = state + v[row, :, :, None] * k[row, :, None]
            checked.after[slot] = state.flatten()
            expected[row] = (state * q[row, :, None]).sum(2).flatten()
    checked.assert_equal(out / 10, expected / 10)


@pytest.mark.parametrize(("channels", "size"), [(6, 6), (700, 16)])
def test_a_step_of_a_selective_state_space_is_its_recurrence(channels, size):
    x, step, gate = draw(3, 4, channels, seed=1)
    b, c = draw(2, 4, size, seed=2)
    decay, skip, offset = draw(channels, size, seed=3), draw(channels, seed=4), 8
    checked = Checked(offset + channels * size)
    out = kernels.selective(*on(x, step, b, c, gate), checked.slots, offset, *on(decay, skip))
    expected = torch.zeros(4, channels, dtype=torch.float64)
    for row, slot in enumerate(ROWS):
        if slot >= 0:
            moved = F.softplus(step[row])[:, None]
            state = torch.exp(-moved * decay.exp()) * checked.before[slot, offset:].view(channels, size)
            state = state + moved * x[row][:, None] * b[row]
            checked.after[slot, offset:] = state.flatten()
            expected[row] = ((state * c[row]).sum(1) + skip * x[row]) * F.silu(gate[row])
    checked.assert_equal(out, expected)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("order", ["norm first", "gate first"])
@pytest.mark.parametrize(("groups", "shared", "width"), [(4, True, 48), (2, False, 600), (1, None, 40)])
def test_a_gated_norm_equals_the_reference(groups, shared, width, order, sigmoid):
    x, gate = on(*draw(2, 5, width, seed=1))
    wide = torch.cat((gate, x), 1)[:, :width]  # as a projection has it
    weight = None if shared is None else on(draw(width // groups if shared else width, seed=2))[0]
    args = 1e-5, groups, order
    out = norms.gated_norm(x, wide, weight, *args, torch.float32, sigmoid=sigmoid)
    expected = reference.gated_norm(x, gate, weight, *args, torch.float32, sigmoid=sigmoid)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    rounded = norms.gated_norm(x, wide, weight, *args, torch.bfloat16, sigmoid=sigmoid)
    torch.testing.assert_close(rounded, out.bfloat16())


def test_softplus_keeps_the_digits_of_small_steps():
    step = torch.tensor([[-20.0], [-9.0], [0.3], [25.0]], dtype=torch.float64)
    state, one = torch.zeros(4, 1, device=DEVICE), torch.ones(1, device=DEVICE)
    slots = Slots(state, torch.arange(4, device=DEVICE))
    inputs = torch.ones(4, 3, device=DEVICE)
    zero, limits = torch.zeros(1, device=DEVICE), (0.0, float("inf"))
    kernels.space(inputs, *on(step), slots, 0, one, zero, zero, limits, SpaceShape(1, 1, 1, 1))
    torch.testing.assert_close(state.double().cpu(), F.softplus(step), rtol=1e-5, atol=0.0)
