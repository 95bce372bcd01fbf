"""Routing and the sum of a token's experts, against definitions in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.experts.reference import expert_sum
from sapwood_kernels.experts.routing import Routing, route
from sapwood_kernels.experts.stack import DenseStack, StackOfProducts

EXPERTS, TOKENS = 12, 40


def chosen_by_definition(logits, routing, correction):
    """Of one token, expert -> weight."""
    if routing.scores == "softmax":
        total = sum(math.exp(each) for each in logits)
        scores = [math.exp(each) / total for each in logits]
    else:
        scores = [1 / (1 + math.exp(-each)) for each in logits]
    eligible = [score + more for score, more in zip(scores, correction, strict=True)]
    size = routing.experts // routing.groups
    groups = [range(start, start + size) for start in range(0, routing.experts, size)]
    taken = 2 if routing.group_score == "two_best" else 1
    groups.sort(key=lambda group: -sum(sorted((eligible[each] for each in group), reverse=True)[:taken]))
    among = [each for group in groups[: routing.chosen_groups] for each in group]
    best = sorted(among, key=lambda each: -eligible[each])[: routing.chosen]
    divisor = sum(scores[each] for each in best) if routing.renormalise else 1.0
    return {each: scores[each] / divisor * routing.scale for each in best}


@pytest.mark.parametrize(
    ("routing", "corrected"),
    [
        (Routing(EXPERTS, 3), False),
        (Routing(EXPERTS, 1, renormalise=True), False),
        (Routing(EXPERTS, EXPERTS, renormalise=True, scale=2.5), False),
        (Routing(EXPERTS, 4, "sigmoid", renormalise=True), True),
        (Routing(EXPERTS, 3, groups=4, chosen_groups=2, scale=16.0), False),
        (Routing(EXPERTS, 4, "sigmoid", True, 2.5, groups=4, chosen_groups=2, group_score="two_best"), True),
        (Routing(EXPERTS, 2, "sigmoid", groups=4, chosen_groups=1, group_score="two_best"), True),
    ],
)
def test_experts_and_weights_are_those_of_the_definition(routing, corrected):
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)) * 2
    correction = torch.linspace(-0.4, 0.4, EXPERTS).roll(5) if corrected else None
    ids, weights = route(logits, routing, correction)
    assert ids.shape == weights.shape == (TOKENS, routing.chosen)
    for token in range(TOKENS):
        extra = [0.0] * EXPERTS if correction is None else correction.tolist()
        expected = chosen_by_definition(logits[token].tolist(), routing, extra)
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_sigmoids_of_nothing_are_not_divided_by_zero():
    _, weights = route(torch.full((2, 4), -200.0), Routing(4, 2, "sigmoid", renormalise=True))
    assert weights.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize(
    "numbers",
    [
        {"chosen": 13},
        {"chosen": 0},
        {"chosen": 2, "groups": 5},
        {"chosen": 2, "groups": 3, "chosen_groups": 4},
        {"chosen": 5, "groups": 3, "chosen_groups": 1},
        {"chosen": 1, "groups": 12, "chosen_groups": 2, "group_score": "two_best"},
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers):
    with pytest.raises(ValueError, match="experts"):
        Routing(EXPERTS, **numbers)


def sum_by_definition(x, ids, weights, gate_up, down, activate):
    rows = []
    for token, experts, factors in zip(x, ids.tolist(), weights, strict=True):
        parts = [down.product(each, activate(gate_up.product(each, token[None]))) for each in experts]
        rows.append(sum(factor * part[0] for factor, part in zip(factors, parts, strict=True)))
    return torch.stack(rows)


def made(tokens, chosen, *, bias=False, width=10, inner=6):
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*sizes):
        return torch.randn(*sizes, generator=generator)

    gate_up = DenseStack(numbers(EXPERTS, 2 * inner, width), numbers(EXPERTS, 2 * inner) if bias else None)
    down = DenseStack(numbers(EXPERTS, width, inner), numbers(EXPERTS, width) if bias else None)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:chosen] for _ in range(tokens)])
    return numbers(tokens, width), ids, numbers(tokens, chosen).abs(), gate_up, down


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (1, 4), (5, 2), (64, 12)])
def test_the_sum_of_experts_is_that_of_the_definition(tokens, chosen, bias):
    parts = made(tokens, chosen, bias=bias)
    ours, theirs = (each(*parts, reference.silu_mul) for each in (expert_sum, sum_by_definition))
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_that_are_elsewhere_add_nothing(tokens):
    x, ids, weights, *stacks = made(tokens, 4)
    here = slice(3, 8)
    local = torch.where((ids >= 3) & (ids < 8), ids - 3, 5)
    ours = expert_sum(x, local, weights, *(DenseStack(each.weight[here]) for each in stacks), reference.silu_mul)
    theirs = expert_sum(x, ids, weights * (local < 5), *stacks, reference.silu_mul)
    assert (local == 5).any()
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_no_tokens_give_no_rows():
    x, ids, weights, *stacks = made(3, 2)
    assert expert_sum(x[:0], ids[:0], weights[:0], *stacks, reference.silu_mul).shape == (0, 10)


def test_matrices_of_experts_without_tokens_are_not_read():
    x, _, weights, gate_up, down = made(4, 2)
    read = []

    def stack(dense):
        def product(expert, rows):
            read.append((expert, len(rows)))
            return dense.product(expert, rows)

        products = [lambda rows, expert=expert: product(expert, rows) for expert in range(EXPERTS)]
        return StackOfProducts(products, dense.outputs)

    ids = torch.tensor([[7, 2], [2, 9], [7, 2], [2, 7]])
    expert_sum(x, ids, weights, stack(gate_up), stack(down), reference.silu_mul)
    assert read == [each for part in ((2, 4), (7, 3), (9, 1)) for each in (part, part)]


def test_a_token_does_not_change_with_the_batch_around_it():
    x, ids, weights, *stacks = made(30, 3)
    alone = expert_sum(x[7:8], ids[7:8], weights[7:8], *stacks, reference.silu_mul)
    among = expert_sum(x, ids, weights, *stacks, reference.silu_mul)[7]
    assert (alone - among).abs().max() <= 1e-6 * among.abs().max()
