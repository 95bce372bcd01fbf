"""The picture of the radix tree, against a brute-force count over all prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sapwood_router.routing.index.prefix_picture import tree_of


def hashes(text: str) -> list[bytes]:
    return [text[:end].encode() for end in range(1, len(text) + 1)]


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=8))
def test_a_tree_of_prefixes_has_every_page_once_with_its_heat(prompts) -> None:
    nodes = tree_of([hashes(prompt) for prompt in prompts], lambda page: (("w", "gpu"),) if len(page) < 3 else ())
    prefixes = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert sum(node.pages for node in nodes) == len(prefixes)
    deepest: list[int] = []
    for node in nodes:
        assert node.parent < len(deepest)
        deepest.append((deepest[node.parent] if node.parent >= 0 else 0) + node.pages)
        assert bool(node.held) == (deepest[-1] < 3)
    most = max((sum(p.startswith(prefix) for p in prompts) for prefix in prefixes), default=0)
    assert max((node.heat for node in nodes), default=0) == most
    assert max(deepest, default=0) == max(map(len, prompts), default=0)
