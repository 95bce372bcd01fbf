"""What a sampled token does to its request: it is appended, may end the request, and is reported. O(1) a token."""

from __future__ import annotations

from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.output import FinishReason, RequestOutput, TokenLogprobs
from sapwood_worker.scheduler.request import Request

_NO_LOGPROBS: list[TokenLogprobs] = []


def stop_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def take_token(request: Request, token: int, logprobs: TokenLogprobs | None = None) -> RequestOutput:
    """Appends the token that a step sampled; the caller ends the request if the answer has a ``finish_reason``.

    Args:
        request: Whose it is. Mutated.
        token: -1: the model's logits were not finite numbers; the request has failed and nothing more of it is shared.
        logprobs: Of the token, if asked for.
    """
    if token < 0:
        request.shared = False
        return end_output(request, "error", "the model's logits are not finite numbers")
    grammar = request.grammar
    if grammar is not None and not grammar.accept(token):
        return end_output(request, "error", f"grammar: {grammar.error}", "grammar")
    known = request.token_ids
    known.append(token)
    length = len(known)
    reason: FinishReason | None = None
    if token in request.stops or (grammar is not None and grammar.finished):
        reason = "stop"
    elif length >= request.max_length:
        reason = "length"
    output = RequestOutput(
        request.serial,
        [token],
        reason,
        request.prompt_length,
        length - request.prompt_length,
        request.cached or 0,
        "",
        "",
        _NO_LOGPROBS if logprobs is None else [logprobs],
        request.prompt_logprobs,
    )
    if request.prompt_logprobs:
        request.prompt_logprobs = []
    return output


def end_output(
    request: Request, reason: FinishReason, error: str = "", error_field: str = "", embedding: bytes = b""
) -> RequestOutput:
    """The last output of a request that ends without a token."""
    return RequestOutput(
        request.serial,
        [],
        reason,
        request.prompt_length,
        request.generated,
        request.cached or 0,
        error,
        error_field,
        _NO_LOGPROBS,
        request.prompt_logprobs,
        embedding=embedding,
    )
