"""Whether one worker computes a request's prompt and another generates, and which workers are for what.

A request is disaggregated where the router may, and where a prefill and a decode worker can be asked. Then it makes two tries on
purpose: a prefill worker computes the prompt and the first token and answers with a ticket for the prompt's pages; a decode
worker gets prompt, token and ticket. To a decode worker that is a request that goes on after a loss, which brings all it needs;
the ticket only saves it the computation. So whatever is lost on the way costs time and nothing else:

- no prefill worker can be asked: the request is computed in one place;
- the prefill worker is lost before the ticket comes: another is asked;
- it is lost afterwards: the decode worker computes what it did not get;
- the decode worker is lost: another one gets the ticket, as long as its lease is renewed; else the request begins again at a
  prefill worker, with what was generated so far as part of the prompt.

Roles are preferences: where nobody else can be asked, any worker serves any request whole.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from sapwood_router.fleet.served_model import Role
from sapwood_router.fleet.worker import Worker

Disaggregate = Literal["always", "never"]


class Part(enum.Enum):
    """What of a request a worker is asked for."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


PREFERRED: dict[Part, tuple[Role, ...]] = {
    Part.WHOLE: (Role.BOTH, Role.DECODE, Role.PREFILL),
    Part.PREFILL: (Role.PREFILL,),
    Part.DECODE: (Role.DECODE, Role.BOTH, Role.PREFILL),
}
"""Who is asked for it, in this order; each only where nobody before can be."""


class Decision(NamedTuple):
    """Whether a request is disaggregated, and why or why not."""

    disaggregated: bool
    reason: str


def decide(
    mode: Disaggregate, workers: Iterable[Worker], prompt_tokens: int, max_tokens: int, refused_by: Collection[str]
) -> Decision:
    """Decides on a request.

    Args:
        mode: What the operator wants.
        workers: Those of the model that can be asked now.
        prompt_tokens: Of the prompt, with what was generated before.
        max_tokens: The most that are still to be generated.
        refused_by: Addresses of workers that answered the request with an error.
    """
    if mode == "never":
        return Decision(False, "the router does not")
    page_sizes: dict[Role, int] = {}
    for worker in workers:
        if worker.model is not None and worker.address not in refused_by and worker.breaker.admits():
            page_sizes[worker.model.role] = worker.model.page_size
    for role in (Role.PREFILL, Role.DECODE):
        if role not in page_sizes:
            return Decision(False, f"no {role.value} worker can be asked")
    if prompt_tokens < page_sizes[Role.PREFILL]:
        return Decision(False, "the prompt fills no page")
    if max_tokens <= 1:
        return Decision(False, "nothing is generated after the first token")
    return Decision(True, "there are prefill and decode workers")
