"""What the running requests do in a step: decode, or go on with what is known of them. O(running)."""

from __future__ import annotations

from typing import NamedTuple

from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.running.retraction import Retraction
from sapwood_worker.core.scheduler.running.running_batch import RunningBatch


class RunningPlan(NamedTuple):
    """Running requests by rank: those that decode, one token each; those of whose prompt one token is left; and those with more
    to compute than that, of which some may have been retracted meanwhile.
    """

    decodes: list[Request]
    last_tokens: list[Request]
    unfinished: list[Request]


def plan_running(running: RunningBatch, retraction: Retraction, step: int, *, in_flight: bool) -> RunningPlan | None:
    """Sees to pages for what is known of each running request, retracting the last in rank if need be.

    Args:
        running: The batch. Mutated.
        retraction: Makes room; what it takes is of a lower rank than all that have a part in the step so far.
        step: The number of the step being planned.
        in_flight: Whether another step is.

    Returns:
        None if a request would have to be retracted that the step in flight may compute.
    """
    decodes: list[Request] = []
    last_tokens: list[Request] = []
    unfinished: list[Request] = []
    for request in tuple(running.requests):
        known = len(request.token_ids) + request.unknown
        left = known - request.planned
        if left <= 0 or request.over or request.slot < 0:
            continue
        if request.unknown and known >= request.max_length:
            continue  # the token in flight is its last
        while known > request.capacity and not running.make_room(request, known):
            if in_flight:
                return None
            retraction.for_pages(step)
            if request.slot < 0:
                break
        else:
            if left > 1:
                unfinished.append(request)
            elif request.planned >= request.prompt_length:
                decodes.append(request)
            else:
                last_tokens.append(request)
    return RunningPlan(decodes, last_tokens, unfinished)
