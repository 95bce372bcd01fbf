"""Sampling: each filter's formula, the distribution drawn from, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.sampling.cpu_sampling import uniform
from sapwood_worker.model.sampling.row_settings import RowSettings
from sapwood_worker.model.sampling.token_sampler import sample

OPS = device_ops("cpu")


def draw(logits, params, positions=None):
    """Token ids for logits [R, V] and R settings."""
    positions = np.arange(len(params)) if positions is None else np.asarray(positions)
    settings = RowSettings(len(params), logits.shape[1], (), OPS)
    for row, each in enumerate(params):
        settings.enter(row, each, 0)
    return sample(logits, settings.sampling(np.arange(len(params)), positions), OPS)[0]


def expected_distribution(logits, params):
    """The plain formula, token by token, in float64."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weights = [math.exp((logits[i] - logits[order[0]]) / params.temperature) for i in range(len(logits))]
    kept = order[: params.top_k] if params.top_k else order
    mass = sum(weights[i] for i in kept)
    nucleus, reached = [], 0.0
    for i in kept:
        nucleus.append(i)
        reached += weights[i] / mass
        if reached >= params.top_p:
            break
    final = [i for i in nucleus if weights[i] >= params.min_p * weights[order[0]]]
    total = sum(weights[i] for i in final)
    return np.array([weights[i] / total if i in final else 0.0 for i in range(len(logits))])


def chi_square_limit(freedom):
    """Exceeded by chance once in a million (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 1e-9},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_plain_formula(setting):
    width, draws = 40, 20_000
    logits = torch.randn(width, generator=torch.Generator().manual_seed(5)) * 2
    params = SamplingParams(seed=11, **setting)
    tokens = draw(logits.expand(draws, width).contiguous(), [params] * draws)
    expected = expected_distribution(logits.double().tolist(), params) * draws
    counts = np.bincount(tokens.numpy(), minlength=width)
    assert not counts[expected == 0].any()
    big = expected >= 5
    rest = expected[~big].sum()
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], max(rest, 1e-9))
    statistic = (((observed - wanted) ** 2) / wanted)[wanted >= 5].sum()
    freedom = max(int((wanted >= 5).sum()) - 1, 1)
    assert statistic <= chi_square_limit(freedom)


@pytest.mark.parametrize("width", [97, 512, 5000, 40_000])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_top_p_keeps_the_smallest_sufficient_set_in_any_vocabulary(width, top_p):
    generator = torch.Generator().manual_seed(width)
    # Flat enough that the nucleus outgrows the first candidates in a large vocabulary.
    logits = torch.randn(width, generator=generator) * 0.5
    probabilities = torch.softmax(logits.double(), 0)
    ordered, order = probabilities.sort(descending=True)
    size = int((ordered.cumsum(0) - ordered < top_p).sum())
    nucleus = set(order[:size].tolist())
    count = 100
    tokens = draw(logits.expand(count, width).contiguous(), [SamplingParams(top_p=top_p, seed=3)] * count)
    assert set(tokens.tolist()) <= nucleus
    # The rarest quarter of the nucleus is reached too.
    tail = set(order[size * 3 // 4 : size].tolist())
    mass = float(probabilities[list(tail)].sum() / ordered[:size].sum()) if tail else 0.0
    if mass * count > 16:
        assert set(tokens.tolist()) & tail


def test_a_row_gets_the_same_token_alone_and_in_any_batch():
    width, rows = 3000, 24
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 3
    params = [SamplingParams(seed=100 + i, **SETTINGS[i % len(SETTINGS)]) for i in range(rows)]
    params[4] = params[9] = SamplingParams(temperature=0.0)
    positions = np.arange(rows) * 7
    together = draw(logits, params, positions).tolist()
    alone = [int(draw(logits[i : i + 1], [params[i]], positions[i : i + 1])) for i in range(rows)]
    assert together == alone
    order = np.random.default_rng(0).permutation(rows)
    shuffled = draw(logits[order], [params[i] for i in order], positions[order]).tolist()
    assert shuffled == [together[i] for i in order]


def test_logits_that_are_rounded_otherwise_seldom_give_another_token():
    width, rows = 131_072, 500
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(20, width, generator=generator) * 3).repeat_interleave(rows // 20, 0)
    logits[:, ::1000] += 10.0
    other = logits + torch.randn(rows, width, generator=generator) * 1e-5
    params = [SamplingParams(seed=i) for i in range(rows)]
    tokens = draw(logits, params)
    assert len(set(tokens.tolist())) > 100
    assert int((tokens != draw(other, params)).sum()) <= 1


@pytest.mark.parametrize("width", [5, 4096, 4097, 40_000])
def test_every_token_can_be_drawn_in_a_vocabulary_of_any_size(width):
    logits = torch.full((3, width), -20.0)
    for row, token in enumerate((0, width // 2, width - 1)):
        logits[row, token] = 20.0
    assert draw(logits, [SamplingParams(seed=i) for i in range(3)]).tolist() == [0, width // 2, width - 1]


def test_greedy_rows_take_the_first_of_the_largest():
    logits = torch.zeros(3, 1024)
    logits[0, 700] = logits[0, 900] = 1.0
    logits[2, 1023] = 1.0
    assert draw(logits, [SamplingParams(temperature=0.0)] * 3).tolist() == [700, 0, 1023]


def test_top_k_one_is_greedy():
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(2))
    tokens = draw(logits, [SamplingParams(top_k=1, temperature=5.0, seed=i) for i in range(50)])
    assert torch.equal(tokens, logits.argmax(-1))


def test_near_zero_temperature_does_not_overflow():
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(2)) * 100
    tokens = draw(logits, [SamplingParams(temperature=1e-6)] * 20)
    assert torch.equal(tokens, logits.argmax(-1))


def test_tokens_as_likely_as_the_last_kept_are_kept():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, -5.0]]).expand(2000, 5).contiguous()
    tokens = draw(logits, [SamplingParams(top_k=2, temperature=2.0)] * 2000)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_logits_of_minus_infinity_are_never_drawn():
    logits = torch.full((500, 300), -math.inf)
    logits[:, [5, 250]] = 0.0
    tokens = draw(logits, [SamplingParams(temperature=1.0)] * 500)
    assert set(tokens.tolist()) == {5, 250}


def test_logits_are_left_as_they_were():
    logits = torch.randn(4, 64)
    before = logits.clone()
    draw(logits, [SamplingParams(temperature=0.7, top_p=0.5, min_p=0.1)] * 4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("width", [1, 31, 97, 1024, 128_256, 151_936, 262_144])
def test_row_max_equals_max(width):
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    values, indices = OPS.row_max(logits)
    expected = logits.max(-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row_max_shows_what_is_not_a_number(bad):
    logits = torch.randn(2, 4096)
    logits[1, 1234] = bad
    largest, tokens = OPS.row_max(logits)
    assert largest.isfinite().tolist() == [True, False]
    assert tokens.tolist() == [int(logits[0].argmax()), -1]


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position():
    seeds = np.arange(1000, dtype=np.uint64).repeat(100)
    positions = np.tile(np.arange(100), 1000)
    both = uniform(seeds, positions, 2)
    assert abs(np.corrcoef(both[:, 0], both[:, 1])[0, 1]) < 0.02
    numbers = both[:, 0]
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, 100, (0, 1))
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() <= chi_square_limit(99)
    grid = numbers.reshape(1000, 100)
    # Neighbouring seeds and neighbouring positions are unrelated.
    for left, right in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.02
    assert len(np.unique(numbers)) == numbers.size


def test_uniform_numbers_never_change():
    # A stream resumed on a newer worker must continue alike.
    numbers = uniform(np.array([7, 0, 2**64 - 1], np.uint64), np.array([3, 0, 100_000]), 2)
    assert numbers[:, 0].tolist() == [0.6042348053683145, 0.6524484863740322, 0.12423738179155697]
    assert numbers[:, 1].tolist() == [0.1933779781975552, 0.530399793615538, 0.9540376503273312]


def test_seeds_beyond_64_bits_and_below_zero_are_accepted():
    logits = torch.randn(3, 50)
    params = [SamplingParams(seed=seed) for seed in (-1, 2**64 - 1, 2**70 - 1)]
    tokens = draw(logits[:1].expand(3, 50).contiguous(), params, [5, 5, 5]).tolist()
    assert tokens[0] == tokens[1] == tokens[2]
