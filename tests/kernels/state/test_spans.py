"""Prompts through states by kernels, against recurrences token by token in float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.state.spans import CHUNK, Spans, tables

pytest.importorskip("triton", reason="Triton is not installed")
convolution = pytest.importorskip("sapwood_kernels.state.triton_span_convolution")
inverse = pytest.importorskip("sapwood_kernels.state.triton_span_inverse")
scanning = pytest.importorskip("sapwood_kernels.state.triton_span_scan")
selective = pytest.importorskip("sapwood_kernels.state.triton_span_selective")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]  # the interpreter has no products of bfloat16
LIMIT = {torch.float32: 3e-5 if ON_GPU else 1e-5, torch.bfloat16: 1e-2}
SLOTS = 12
PHASES = [each for each in Phase if ON_GPU or each is not Phase.shrink]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


class Prompts:
    """Spans of a step with gaps between them, of slots in no order, some with snapshots on the way."""

    def __init__(self, counts: list[int], saves: list[list[int]] | None = None, first: int = 0) -> None:
        self.counts, self.saves = counts, saves or [[] for _ in counts]
        self.firsts, at = [], first
        for count in counts:
            self.firsts.append(at)
            at += count + 2
        self.total = at
        self.slots = [(5 * span + 1) % (SLOTS // 2) for span in range(len(counts))]
        free = iter(range(SLOTS // 2, SLOTS))
        self.targets = [[next(free) for _ in each] for each in self.saves]

    @property
    def tables(self) -> Spans:
        rows = [
            (span, after, target)
            for span, (afters, targets) in enumerate(zip(self.saves, self.targets, strict=True))
            for after, target in zip(afters, targets, strict=True)
        ]
        saves = np.array(rows, np.int64).reshape(-1, 3)
        firsts, counts, slots = (np.array(each, np.int64) for each in (self.firsts, self.counts, self.slots))
        return tables(firsts, counts, slots, saves, device_ops(DEVICE).to_device)

    def expected(self, states: torch.Tensor, step) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of ``step(state, token) -> (state, output)``; outputs that are not written are NaN."""
        states, outs = states.double().clone(), {}
        for span, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            state = states[self.slots[span]].clone()
            for at in range(count):
                state, outs[first + at] = step(state, first + at)
                for after, target in zip(self.saves[span], self.targets[span], strict=True):
                    if after == at + 1:
                        states[target] = state
            states[self.slots[span]] = state
        nothing = torch.full_like(next(iter(outs.values())), float("nan"))
        return torch.stack([outs.get(at, nothing) for at in range(self.total)]), states

    def check(self, got: torch.Tensor, states: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor], limit: float):
        expected, after = wanted
        assert torch.equal(got.isnan(), expected.isnan().reshape(got.shape)), (
            "other tokens than those of spans were written"
        )
        near(got.nan_to_num(), expected.nan_to_num().reshape(got.shape), limit)
        for slot in range(SLOTS):
            near(states[slot], after[slot], limit)


def near(got: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    assert float((got.double() - wanted.double()).norm()) <= limit * float(wanted.double().norm())


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


CASES = [
    Prompts([1]),
    Prompts([CHUNK]),
    Prompts([5, CHUNK + 1, 1], first=3),
    Prompts([2 * CHUNK + 7, 20], [[1, CHUNK + 2], [20]]),
]


@pytest.mark.parametrize("prompts", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gate", "silu", "bias"), [(False, True, True), (False, False, False), (True, False, False)])
def test_convolutions_begin_with_the_window_of_their_slot(prompts, dtype, gate, silu, bias):
    channels, taps = 150, 4
    x = drawn(prompts.total, channels * (3 if gate else 1)).to(dtype)
    weight, biases = drawn(channels, taps), drawn(channels) if bias else None
    states = drawn(SLOTS, channels * (taps - 1) + 3)[:, :-3]
    first, second, third = (x, x, x) if not gate else x.chunk(3, 1)
    inputs = (first * third if gate else x).double()

    def step(state, at):
        window = torch.cat((state.view(channels, -1), inputs[at, :, None]), 1)
        out = (window * weight.double()).sum(1) + (0 if biases is None else biases.double())
        out = F.silu(out) if silu else out
        return window[:, 1:].flatten(), out * second[at].double() if gate else out

    wanted = prompts.expected(states, step)
    out = unwritten(prompts.total, channels, dtype=dtype)
    convolution.convolve(x, states, prompts.tables, weight, biases, out, silu=silu, gated=gate)
    prompts.check(out, states, wanted, LIMIT[dtype])


def space(
    prompts: Prompts,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    keys: int,
    values: int,
    skip: bool,
    tile=scanning.TILE,
):
    """A state space's prompts by the kernel, checked."""
    x, b, c = (drawn(prompts.total, *size).to(dtype) for size in ((heads, values), (groups, keys), (groups, keys)))
    step = drawn(prompts.total, heads).exp()
    decay = -step * drawn(heads).exp()
    skipped = drawn(heads) if skip else None
    states = drawn(SLOTS, 5 + heads * values * keys)[:, 5:]

    def one(state, at):
        bs, cs = (each[at].double().repeat_interleave(heads // groups, 0) for each in (b, c))
        state = state.view(heads, values, keys) * decay[at].double().exp()[:, None, None]
        state = state + torch.einsum("hp,hn->hpn", x[at].double() * step[at, :, None], bs)
        out = torch.einsum("hpn,hn->hp", state, cs)
        return state.flatten(), out + (skipped[:, None] * x[at].double() if skip else 0)

    wanted = prompts.expected(states, one)
    out = unwritten(prompts.total, heads, values)
    scanning.scan(
        c,
        b,
        x,
        decay,
        states,
        prompts.tables,
        out,
        key_major=False,
        step=step,
        skip=skipped,
        precision="tf32x3",
        tile=tile,
    )
    prompts.check(out, states, wanted, LIMIT[dtype])


@pytest.mark.parametrize("prompts", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "keys", "values", "skip"), [(2, 16, 32, True), (1, 20, 24, False)])
def test_state_spaces_are_those_of_their_steps(prompts, dtype, groups, keys, values, skip):
    space(prompts, dtype, 2, groups, keys, values, skip)


@pytest.mark.parametrize("tile", [(16, 4, 3), (64, 8, 2, 32)])
def test_no_tile_changes_a_state_space(tile):
    space(CASES[3], DTYPES[-1], 2, 1, 32, 64, True, scanning.Tile(*tile))


def test_one_prompt_is_cut_otherwise_than_many():
    one, many = (scanning.tile_of(False, 128, 64, 128 * spans) for spans in (1, 8))
    assert (one.stages, many.stages) == (3, 2)
    assert scanning.tile_of(False, 96, 64, 128) == scanning.TILE, "nothing was measured"


@pytest.mark.parametrize("stages", [0, 1])
def test_a_tile_of_one_stage_is_refused(stages):
    with pytest.raises(AssertionError):
        scanning.Tile(32, 4, stages)


def delta(
    prompts: Prompts, dtype: torch.dtype, key_heads: int, shared: int, keys: int, values: int, alike: bool = False
):
    """The delta rule's prompts by the kernels, checked."""
    heads = key_heads * shared
    mixed = drawn(prompts.total, 2 * key_heads * keys + heads * values)
    if alike:  # all keys the same, none decays: the inverse has its largest entries
        mixed[:] = mixed[:1]
    mixed = mixed.to(dtype)
    decay = torch.zeros(prompts.total, heads, device=DEVICE) if alike else -drawn(prompts.total, heads).exp()
    beta = torch.ones_like(decay) if alike else drawn(prompts.total, heads).sigmoid()
    states = drawn(SLOTS, heads * keys * values + 7)[:, 7:]
    q, k, v = mixed.split([key_heads * keys, key_heads * keys, heads * values], 1)
    q, k, v = q.view(-1, key_heads, keys), k.view(-1, key_heads, keys), v.view(-1, heads, values)

    def unit(x):
        x = x.double()
        return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 0)

    def one(state, at):
        key, query = unit(k[at]), unit(q[at]) * keys**-0.5
        state = state.view(heads, keys, values) * decay[at].double().exp()[:, None, None]
        wrong = v[at].double() - torch.einsum("hkv,hk->hv", state, key)
        state = state + torch.einsum("hk,hv->hkv", key, wrong * beta[at].double()[:, None])
        return state.flatten(), torch.einsum("hkv,hk->hv", state, query)

    wanted = prompts.expected(states, one)
    spans = prompts.tables
    solved = inverse.inverses(mixed, decay, beta, spans, key_heads, keys, "tf32x3")
    out = unwritten(prompts.total, heads, values)
    scanning.scan(q, k, v, decay, states, spans, out, key_major=True, delta=scanning.Delta(*solved), precision="tf32x3")
    prompts.check(out, states, wanted, LIMIT[dtype])


@pytest.mark.parametrize("prompts", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "shared", "keys", "values"), [(2, 2, 16, 32), (1, 3, 24, 20)])
def test_the_delta_rule_is_that_of_its_steps(prompts, dtype, key_heads, shared, keys, values):
    delta(prompts, dtype, key_heads, shared, keys, values)


def test_the_delta_rule_holds_where_all_keys_are_alike():
    delta(CASES[3], torch.float32, 1, 2, 16, 16, alike=True)


@pytest.mark.parametrize("prompts", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_selective_scans_are_those_of_their_steps(prompts, dtype):
    channels, numbers = 40, 12
    x, step = drawn(prompts.total, channels).to(dtype), drawn(prompts.total, channels).exp()
    decay, skip = -drawn(channels, numbers).exp(), drawn(channels)
    b, c = drawn(prompts.total, 2 * numbers).chunk(2, 1)
    states = drawn(SLOTS, 9 + channels * numbers)[:, 9:]

    def one(state, at):
        move = step[at].double()[:, None]
        state = state.view(channels, numbers) * (move * decay.double()).exp()
        state = state + move * x[at].double()[:, None] * b[at].double()
        return state.flatten(), (state * c[at].double()).sum(1) + skip.double() * x[at].double()

    wanted = prompts.expected(states, one)
    out = unwritten(prompts.total, channels)
    selective.selective_scan(x, step, decay, b, c, skip, states, prompts.tables, out)
    prompts.check(out, states, wanted, LIMIT[torch.float32])


@settings(max_examples=100 if ON_GPU else 5, deadline=None, phases=PHASES)
@given(st.data())
def test_any_prompts_and_snapshots_leave_the_states_of_their_steps(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    counts = data.draw(st.lists(st.integers(1, 3 * CHUNK if ON_GPU else CHUNK + 9), min_size=1, max_size=3))
    saves = [sorted(data.draw(st.sets(st.integers(1, count), max_size=2))) for count in counts]
    prompts = Prompts(counts, saves, data.draw(st.integers(0, 3)))
    space(prompts, torch.float32, 2, data.draw(st.sampled_from([1, 2])), 16, 16, True)
    delta(prompts, torch.float32, 1, 2, 16, 16)


@pytest.mark.parametrize("size", [1, 63, 64, 100, 150])
def test_a_prompt_in_steps_of_any_size_ends_in_one_state(size):
    count, heads, keys, values = 150, 2, 16, 16
    mixed, decay = drawn(count, 2 * keys + heads * values), -drawn(count, heads).exp()
    beta, states = drawn(count, heads).sigmoid(), drawn(2, heads * keys * values)
    q, k, v = mixed[:, :keys, None].mT, mixed[:, keys : 2 * keys, None].mT, mixed[:, 2 * keys :].view(-1, heads, values)
    results = []
    for sizes in (count, size):
        after, out = states.clone(), unwritten(count, heads, values)
        for first in range(0, count, sizes):
            cut = np.array([[first], [min(sizes, count - first)], [1]])
            spans = tables(*cut, np.zeros((0, 3), np.int64), device_ops(DEVICE).to_device)
            solved = inverse.inverses(mixed, decay, beta, spans, 1, keys, "tf32x3")
            scanning.scan(
                q, k, v, decay, after, spans, out, key_major=True, delta=scanning.Delta(*solved), precision="tf32x3"
            )
        results.append((out, after))
        assert torch.equal(after[0], states[0])
    near(results[1][0], results[0][0], 1e-5)
    near(results[1][1], results[0][1], 1e-5)
