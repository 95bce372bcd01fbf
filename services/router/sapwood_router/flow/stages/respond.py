"""Stage 7: makes the client's next delta of new output: the output, its tokens, and in the last one the usage."""

from __future__ import annotations

import time

from sapwood_common.errors import InternalError
from sapwood_router.request.context import Delta, Finish, FinishReason, RequestContext, Usage
from sapwood_router.request.output_stream import OutputChunk


def respond(context: RequestContext, chunk: OutputChunk, sent_tokens: int) -> Delta:
    """The client's next delta.

    Args:
        context: ``first_token`` and ``usage`` are filled when it is time.
        chunk: New output.
        sent_tokens: How many of the request's tokens earlier deltas carried.
    """
    if context.first_token is None:
        context.first_token = time.perf_counter()
    if not context.parallel_tool_calls:
        chunk.output.tool_calls = [call for call in chunk.output.tool_calls if call.index == 0]
    if not chunk.ended:
        return _delta(context, chunk, sent_tokens, chunk.tokens)
    stop_token = None
    if chunk.stop_match is not None:
        reason, tokens = FinishReason.STOP, chunk.tokens
    elif context.worker_finish is not None:
        reason, tokens = context.worker_finish, len(context.output_ids)
        last = context.output_ids[-1] if tokens else -1
        if reason is FinishReason.STOP and last in context.sampling.stop_token_ids and last not in context.own_ends:
            stop_token = last
    else:
        raise InternalError("the tokenizer ended a stream that was not over")
    context.usage = Usage(
        len(context.token_ids),
        tokens,
        context.cached_tokens,
        context.accepted_prediction_tokens,
        context.rejected_prediction_tokens,
        min(chunk.reasoning_tokens, tokens),
    )
    delta = _delta(context, chunk, sent_tokens, tokens)
    delta.finish = Finish(reason, context.usage, chunk.stop_match, stop_token)
    return delta


def _delta(context: RequestContext, chunk: OutputChunk, start: int, end: int) -> Delta:
    delta = Delta(chunk.output, context.output_ids[start:end].tolist(), text_tokens=min(chunk.tokens, end) - start)
    if context.logprobs:
        delta.logprobs = context.logprobs[start:end]
    return delta
