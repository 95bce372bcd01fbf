"""Experts move between ranks while a model answers: the same answers from wherever they are, ranks as threads."""

from __future__ import annotations

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_testing.worker.split_models import SHAPE, load, logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.core.expert_balancing import ExpertBalancer
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseMLP
from sapwood_worker.records.expert_load import ExpertMove, moved

TOKENS = [3 + i * 7 % 90 for i in range(23)]


def placed(group, redundant):
    return Parallel(tp=group, ep=group, redundant_experts=redundant)


def layers_of(loaded):
    return [each.experts.places for each in loaded.model.modules() if isinstance(each, SparseMLP)]


@pytest.mark.parametrize(("name", "size"), [("qwen2-moe", 2), ("qwen3-moe", 4), ("gpt-oss", 2), ("deepseek-v3", 2)])
def test_answers_stay_while_experts_move(tiny_model, name, size):
    path = tiny_model(name, **SHAPE).path
    expected = logits_of(load(path), TOKENS)

    def work(group):
        parallel = placed(group, 2 * size)
        loaded = load(path, parallel)
        balancer, found, copies = ExpertBalancer(size, 2 * size), [logits_of(loaded, TOKENS, parallel)], 0
        loaded.model.forget_expert_tokens()
        for _ in range(6):
            logits_of(loaded, TOKENS, parallel)
            totals = [[100 * tokens for tokens in layer] for layer in loaded.model.expert_tokens().tolist()]
            balancer.see(totals)
            while balancer._due:
                moves = balancer.take()
                loaded.model.move_experts(moves)
                found.append(logits_of(loaded, TOKENS, parallel))
            copies = max(
                copies, *(len(layer.slots) - layer.slots.count(-1) - layer.own.total for layer in layers_of(loaded))
            )
        assert [layer.slots for layer in layers_of(loaded)] == balancer.slots
        return found, balancer.moves, copies

    ranks = run_ranks(size, work)
    found, count, copies = ranks[0]
    assert count >= 2 and len(found) > 2, "experts have moved"
    assert copies > 0, "some experts were on several ranks"
    for others, *_ in ranks[1:]:
        assert all(map(torch.equal, found, others))
    limit = 2e-5 * float(expected.abs().max())
    assert all(float((each - expected).abs().max()) <= limit for each in found)


def test_a_tokens_sum_does_not_depend_on_where_its_experts_are(tiny_model):
    """To the bit, as long as an expert's tokens are on one rank: products of fewer rows may round differently."""
    path = tiny_model("qwen3-moe", **SHAPE).path
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(16, generator=generator).tolist() for _ in range(4)]

    def work(group):
        parallel = placed(group, 4)
        loaded = load(path, parallel)
        found = [logits_of(loaded, TOKENS, parallel)]
        for order in orders:
            for layer in range(2):
                loaded.model.move_experts([ExpertMove(layer, slot, source) for slot, source in enumerate(order)])
            found.append(logits_of(loaded, TOKENS, parallel))
        return found, [layer.slots for layer in layers_of(loaded)]

    slots = [0, 1, 2, 3, 4, 5, -1, -1, 6, 7, 8, 9, 10, 11, -1, -1]
    for order in orders:
        slots = moved(slots, [ExpertMove(0, slot, source) for slot, source in enumerate(order)])
    for found, places in run_ranks(2, work):
        assert places == [slots] * 2
        assert all(torch.equal(each, found[0]) for each in found)


def test_tokens_of_an_expert_take_its_copies_in_turns(tiny_model):
    path = tiny_model("qwen3-moe", **SHAPE).path

    def work(group):
        loaded = load(path, placed(group, 2))
        loaded.model.move_experts([ExpertMove(0, 13, 0)])
        ids = torch.tensor([[0, 1], [0, 6], [12, 0]])
        return layers_of(loaded)[0].local(ids).tolist()

    first, second = run_ranks(2, work)
    assert first == [[0, 1], [7, 7], [7, 0]]
    assert second == [[7, 7], [6, 0], [7, 7]]


def test_what_cannot_move_is_refused(tiny_model):
    path = tiny_model("qwen3-moe", **SHAPE).path
    with pytest.raises(ConfigError, match="--expert-parallel redundant: 3 slots cannot be handed out to 2 ranks"):
        run_ranks(2, lambda group: load(path, placed(group, 3)))
