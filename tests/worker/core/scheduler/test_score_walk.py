"""Trees of continuations: the walk computes each token once, and a model's scores are those of separate requests."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_worker.core.scheduler.score_walk import ScoreWalk
from sapwood_worker.records.continuations import Continuation, longest

trees = st.lists(
    st.tuples(st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=12
).map(lambda given: [Continuation(parent % (index + 1) - 1, ids) for index, (parent, ids) in enumerate(given)])


def path(nodes: list[Continuation], index: int) -> list[int]:
    node = nodes[index]
    return [*(path(nodes, node.parent) if node.parent >= 0 else ()), *node.token_ids]


@given(trees, st.lists(st.integers(10, 19), min_size=1, max_size=5))
def test_a_walk_asks_for_each_token_once_after_all_that_comes_before_it(nodes, prompt):
    walk = ScoreWalk(len(prompt), nodes)
    texts = []
    for index, node in enumerate(nodes):
        whole = path(nodes, index)
        texts += [
            (*prompt, *whole[: len(whole) - len(node.token_ids) + place + 1]) for place in range(len(node.token_ids))
        ]
    asked: dict[int, tuple[int, ...]] = {}
    held, computed = [*prompt], 0
    branch = walk.branch
    while branch is not None:
        assert len(prompt) <= branch.start <= len(held)
        held[branch.start :] = branch.tokens
        computed += len(branch.tokens)
        places = range(branch.start, len(held))
        for position, wanted in branch.wanted.items():
            assert position in places or (position == len(prompt) - 1 and branch.start == len(prompt))
            for token, number in wanted:
                assert number not in asked
                asked[number] = (*held[: position + 1], token)
        branch = walk.advance()
    assert [asked[number] for number in range(len(texts))] == texts
    inner = Counter(node.parent for node in nodes)
    assert computed == walk.computed == sum(len(each.token_ids) - (inner[i] == 0) for i, each in enumerate(nodes))
    assert longest(nodes) == max(len(path(nodes, index)) for index in range(len(nodes)))


@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 3}, {"prefix_cache": False}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
def test_scores_of_a_tree_are_those_of_separate_requests(name, settings, tiny_model, make_runner):
    from sapwood_common.contract.sampling import SamplingParams
    from sapwood_testing.worker.model_scheduler import scheduler_for
    from sapwood_worker.core.scheduler.request import Request

    runner = make_runner(tiny_model(name).path, page_size=16)
    nodes = [
        Continuation(-1, [5, 6, 7]), Continuation(0, [8]), Continuation(0, [9, 10, 11]), Continuation(-1, [12]),
        Continuation(3, [13, 14]), Continuation(-1, [15]), Continuation(2, [5] * 20), Continuation(2, [6]),
    ]  # fmt: skip
    prompt = [(7 * place) % 50 + 1 for place in range(37)]

    def run(request: Request) -> list[float]:
        scheduler = scheduler_for(runner.info, **settings)
        found = []
        for _ in range(2):  # the second finds the prompt cached
            scheduler.add(request())
            while scheduler.has_work:
                outputs = scheduler.update(runner.execute(scheduler.schedule()))
                found += [[each.logprob for each in one.prompt_logprobs] for one in outputs if one.prompt_logprobs]
                scheduler.check()
        assert found[0] == pytest.approx(found[1], abs=1e-4)
        return found[0]

    scores = run(lambda: Request(0, "tree", prompt, SamplingParams(max_tokens=1), continuations=nodes))
    assert len(scores) == sum(len(node.token_ids) for node in nodes)
    at = 0
    for index, node in enumerate(nodes):
        whole = [*prompt, *path(nodes, index)]
        start = len(whole) - len(node.token_ids) - 1
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        alone = run(lambda whole=whole, sampling=sampling: Request(0, "one", whole, sampling))
        assert scores[at : at + len(node.token_ids)] == pytest.approx(alone, abs=1e-4)
        at += len(node.token_ids)
    assert all(math.isfinite(each) and each < 0 for each in scores)
