"""Requests with the same prompt: one computes it, and the others sample their first token from its logits too.

Algorithm. A waiting request whose turn it is does not start in a step that computes a part of its prompt for another request. If
that part is the prompt's end, it joins the step: it takes a free row of the page table, without pages, and the step samples a
token for it after the prompt's last token, by its own settings. After the step it gives the row back and waits to be started, as
a retracted request does: with its first token, and with the prompt in the prefix cache. So no token of the prompt is computed
twice, not even the last one. Who joins would have been started otherwise, so nobody is overtaken.

Invariants. A request that has joined a step is in the queue, ``held``, and in flight; its row is in no other step. Only a request
that has never run joins. Nothing joins where the prefix cache is off or layers keep states: it would compute the prompt, or what
follows the last snapshot, all the same. Neither does a request that wants log probabilities of its prompt, is pooled, is scored,
or has to do with another worker.

O(1) for a request that arrives or gets tokens of its prompt, and O(prompt) for each that joins.
"""

from __future__ import annotations

from typing import NamedTuple

from sapwood_worker.core.scheduler.request import Request

_TAIL = 16
"""The last tokens of a prompt by which others like it are found."""


class Join(NamedTuple):
    """A request that has joined a step.

    Attributes:
        request: The request.
        part: The part of the step that computes the prompt's end.
        slot: The row of the page table that it has during the step.
    """

    request: Request
    part: int
    slot: int


def prompt_key(request: Request) -> tuple[int, bytes] | None:
    """What requests with the same prompt have in common, and few others. None: it can neither join nor be joined. O(1)."""
    special = request.pooling or request.walk is not None or request.hands_off or request.ticket is not None
    if special or request.sampling.prompt_logprobs is not None:
        return None
    return len(request.token_ids), request.keyed[-_TAIL:].tobytes()


def alike(request: Request, other: Request) -> bool:
    """Whether the tokens of two requests with one ``prompt_key`` give the same logits. O(tokens)."""
    return request.namespace == other.namespace and request.lora == other.lora and request.keyed == other.keyed
