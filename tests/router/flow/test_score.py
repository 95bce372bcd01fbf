"""Trees of continuations: what is asked of workers, and what is refused before it is made."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.contract.limits import MOST_SCORED_TOKENS
from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.steps import all_at_once
from sapwood_router.flow.score import _TOKENS_AT_ONCE, _tree

FIRST = 7
"""What all sequences begin with."""


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12),
    data=st.data(),
)
def test_each_sequence_gets_the_log_probabilities_of_its_own_tokens(sequences: list[list[int]], data: Any) -> None:
    whole = [[FIRST, *each] for each in sequences]
    starts = [data.draw(st.integers(1, len(each) - 1)) for each in whole]
    tree = all_at_once(_tree(whole, starts))
    trails: list[tuple[int, ...]] = []
    known: list[tuple[int, ...]] = []
    for node in tree.nodes:
        trail = known[node.parent] if node.parent >= 0 else tuple(tree.prompt)
        for token in node.token_ids:
            trail = (*trail, token)
            trails.append(trail)
        known.append(trail)
    assert len(set(trails)) == len(trails), "tokens that sequences share are computed once"
    # The oracle: a token's log probability is what stands before it and itself.
    values: Any = trails
    for index, (each, start) in enumerate(zip(whole, starts, strict=True)):
        expected: Any = [tuple(each[: place + 1]) for place in range(start, len(each))]
        assert tree.of(index, values) == expected
    begun = {tuple(each[:end]) for each in whole for end in range(len(tree.prompt) + 1, len(each) + 1)}
    assert set(trails) == begun


def test_a_tree_of_too_many_tokens_is_refused_while_it_grows_and_has_pauses() -> None:
    sequences = [[FIRST, index, *range(3000)] for index in range(300)]
    steps = _tree(sequences, [1] * len(sequences))
    pauses = itertools.count()
    with pytest.raises(InvalidArgumentError, match="more than 65536 tokens"):
        for _ in steps:
            next(pauses)
    assert next(pauses) <= MOST_SCORED_TOKENS // 3000 + MOST_SCORED_TOKENS // _TOKENS_AT_ONCE + 2, (
        "a tenth was looked at"
    )


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
@pytest.mark.parametrize("form", ["list", "object"])
async def test_token_ids_out_of_range_are_refused_by_name(cluster: Any, token: int, form: str) -> None:
    given = [5, token] if form == "list" else {"token_ids": [5, token]}
    answer = await cluster.http.post("/v1/score_tree", json={"prompt": [1, 2], "continuations": [[5], given]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continuations[1]"
    assert "0..4294967295" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("continuations", "says"),
    [
        (["a"] * 60_000, "at most 1024"),
        ([{"text": "a", "next": ["b"] * 600}, {"text": "c", "next": ["d"] * 600}], "at most 1024"),
        ([{"text": "a", "next": [{}]}], "not empty"),
        ([{"text": "a", "next": "b"}], "list of continuations"),
    ],
)
async def test_trees_that_are_none_are_refused(cluster: Any, continuations: list[Any], says: str) -> None:
    answer = await cluster.http.post("/v1/score_tree", json={"prompt": "go", "continuations": continuations})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("continuations")


async def test_a_prompt_of_tokens_is_held_once_however_many_continue_it(cluster: Any) -> None:
    prompt = [*range(5, 50_005)]
    tracemalloc.start()
    answer = await cluster.http.post(
        "/v1/score_tree", json={"prompt": prompt, "continuations": [[token] for token in range(1000)]}
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 501, "the fake scores nothing"
    (call,) = cluster.calls()
    assert list(call.request.token_ids) == prompt
    assert [list(node.token_ids) for node in call.request.continuations] == [[token] for token in range(1000)]
    assert peak < 64 << 20, "each path with the prompt would be 400 MB"
