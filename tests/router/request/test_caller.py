"""Who asks: what is kept of the names that clients give."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_router.request.caller import NOBODY, in_session


def test_a_long_sessions_name_counts_by_its_digest_and_a_short_one_as_it_is() -> None:
    assert in_session(NOBODY, "s" * 128).session == "s" * 128
    one, other = (in_session(NOBODY, "s" * 1_000_000 + end).session for end in "ab")
    assert one != other and len(one) == len(other) <= 128


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key", "user"])
async def test_the_policy_keeps_no_megabyte_of_a_name(make_cluster: Any, field: str) -> None:
    async with make_cluster(policy="session_affinity") as cluster:
        for _ in range(2):
            answer = await cluster.http.post("/v1/completions", json={"prompt": "go", field: "s" * 1_000_000})
            assert answer.status_code == 200, answer.text
        policy = cluster.router._policies.of("fake").live
        assert [len(name) for name in policy._homes] == [32]
