"""Stage 4: the worker's request."""

from __future__ import annotations

from msgspec.structs import replace

from sapwood.v1 import worker_pb2
from sapwood_router.fleet.convert import to_worker_request
from sapwood_router.request.caller import NOBODY
from sapwood_router.request.context import RequestContext
from sapwood_router.request.request_ids import unique_id


def build(context: RequestContext) -> worker_pb2.WorkerGenerateRequest:
    """The request as the next worker takes it: the prompt and what was generated already, with what is left to generate.

    Each try has an id of its own: the worker of the last one may not have learned yet that it is over.
    """
    sampling, done = context.sampling, len(context.output_ids)
    if done:
        sampling = replace(sampling, max_tokens=sampling.max_tokens - done)
    token_ids = context.token_ids + context.output_ids if done else context.token_ids
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
    return request
