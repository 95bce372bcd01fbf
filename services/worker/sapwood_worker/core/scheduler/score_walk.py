"""Walks through a tree of continuations in one row of the page table, so that every token is computed once.

Algorithm: depth first. After a branch the request goes back to where the next one leaves it, and that branch's keys and values
overwrite those of the branch before, as the tokens of a rejected draft are overwritten. A token's log probability comes from the
position before it, which is computed once for all nodes that continue there; a leaf's last token is never computed. O(tokens).

Invariants: only the prompt's pages enter the prefix cache. ``token_ids`` of the request are the prompt and the path of the
present branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sapwood_worker.records.continuations import Continuation


class Branch(NamedTuple):
    """A piece of the walk.

    Attributes:
        start: The position of its first token.
        tokens: What is computed, one after another.
        wanted: By the position of a token that is computed: the tokens that may follow it, each with its number.
    """

    start: int
    tokens: list[int]
    wanted: dict[int, list[tuple[int, int]]]


class ScoreWalk:
    """The walk of one request.

    Args:
        prompt_length: Tokens of the prompt, at least one.
        nodes: The tree; at least one node.

    Attributes:
        logprobs: float: one for each token of each node, in the nodes' order; 0 until it is known.
        computed: Tokens after the prompt that the whole walk computes.
    """

    def __init__(self, prompt_length: int, nodes: Sequence[Continuation]) -> None:
        children: list[list[int]] = [[] for _ in nodes]
        roots: list[int] = []
        firsts: list[int] = []
        count = 0
        for index, node in enumerate(nodes):
            (children[node.parent] if node.parent >= 0 else roots).append(index)
            firsts.append(count)
            count += len(node.token_ids)
        self.logprobs = [0.0] * count
        self._branches = [Branch(prompt_length, [], {})]
        stack = [(index, prompt_length, self._branches[0]) for index in reversed(roots)]
        while stack:
            index, start, above = stack.pop()
            tokens, flat = nodes[index].token_ids, firsts[index]
            above.wanted.setdefault(start - 1, []).append((tokens[0], flat))
            computed = tokens if children[index] else tokens[:-1]
            if not computed:
                continue
            branch = self._branches[-1]
            if start != branch.start + len(branch.tokens):
                branch = Branch(start, [], {})
                self._branches.append(branch)
            branch.tokens.extend(computed)
            for place in range(1, len(tokens)):
                branch.wanted.setdefault(start + place - 1, []).append((tokens[place], flat + place))
            end = start + len(computed)
            stack += [(child, end, branch) for child in reversed(children[index])]
        self.computed = sum(len(branch.tokens) for branch in self._branches)
        self._at = 0

    @property
    def branch(self) -> Branch:
        """The present one."""
        return self._branches[self._at]

    def advance(self) -> Branch | None:
        """The next branch; None: there is none."""
        if self._at + 1 == len(self._branches):
            return None
        self._at += 1
        return self.branch

    def put(self, number: int, logprob: float) -> None:
        """Notes a token's log probability; again after a retraction."""
        self.logprobs[number] = logprob
