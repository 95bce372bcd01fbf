"""Stage 4: the worker's request."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sapwood.v1 import worker_pb2
from sapwood_router.fleet.convert import pack, to_worker_request
from sapwood_router.request.caller import NOBODY
from sapwood_router.request.context import RequestContext
from sapwood_router.request.request_ids import unique_id
from sapwood_router.request.tokens import MANY, pieces


def build(
    context: RequestContext, *, hand_off: bool = False, ticket: worker_pb2.HandoffTicket | None = None
) -> tuple[worker_pb2.WorkerGenerateRequest, Sequence[bytes]]:
    """The message for the next worker, with the prompt, the tokens generated so far, and how many are left to generate.

    Args:
        context: The request; its tries are counted.
        hand_off: Whether the worker computes the prompt and one token only.
        ticket: For the prompt's pages.

    Returns:
        The message, and the tokens of a very long prompt in the form of :func:`~sapwood_router.fleet.convert.pack`; the message
        then has none. Each try has an id of its own, because the worker of the previous try may not know yet that it is over.
    """
    sampling, done = context.sampling, len(context.output_ids)
    if done:
        sampling = replace(sampling, max_tokens=sampling.max_tokens - done)
    if context.handoffs and context.prompt_logprobs:  # the first worker has told them
        sampling = replace(sampling, prompt_logprobs=None)
    token_ids, more = context.token_ids, context.packed
    if done:
        token_ids, more = [*token_ids, *context.output_ids], ()
    if len(token_ids) > MANY:
        more = more or [pack(piece) for piece in pieces(token_ids)]
        token_ids, context.packed = [], ()
    context.attempts += 1
    request_id = context.worker_request_id if context.attempts == 1 else unique_id(context.request_id)
    request = to_worker_request(request_id, token_ids, sampling)
    if done:
        request.output_tokens = done
    caller = context.caller
    if caller is not NOBODY:
        request.priority, request.tenant, request.cache_salt = caller.priority, caller.tenant, caller.cache_salt
    if context.compiled_grammar:
        request.grammar.compiled = context.compiled_grammar
    if hand_off:
        request.hand_off = True
    if ticket is not None:
        request.ticket.CopyFrom(ticket)
    return request, more
