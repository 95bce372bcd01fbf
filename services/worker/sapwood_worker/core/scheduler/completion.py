"""Appends a sampled token to its request, with those that a grammar then forces; ends the request if it must; reports.

O(1) a token. Forced tokens are computed in the next step together, as a chunk of a prompt is.
"""

from __future__ import annotations

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.output import FinishReason, RequestOutput, TokenLogprobs

_NO_LOGPROBS: list[TokenLogprobs] = []


def stop_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def may_jump(request: Request) -> bool:
    """Whether tokens that the request's grammar forces may be appended without asking the model.

    They may not if log probabilities are asked for, or if the runner counts tokens (penalties) or bans some.
    """
    sampling = request.sampling
    unbiased = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    free = not (sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words_ids)
    return request.grammar is not None and sampling.logprobs is None and unbiased and free


def take_token(request: Request, token: int, logprobs: TokenLogprobs | None = None) -> RequestOutput:
    """Appends the token that a step sampled, and those that the grammar forces then.

    The caller ends the request if the answer has a ``finish_reason``.

    Args:
        request: The token's request. Mutated.
        token: -1: the model's logits were not finite numbers; the request has failed and nothing more of it is shared.
        logprobs: The token's log probabilities, if asked for.
    """
    if token < 0:
        request.shared = False
        return end_output(request, "error", _no_token(request))
    grammar = request.grammar
    if grammar is not None and not grammar.accept(token):
        return end_output(request, "error", f"grammar: {grammar.error}", "grammar")
    known = request.token_ids
    known.append(token)
    tokens = [token]
    reason: FinishReason | None = None
    while True:
        if token in request.stops or (grammar is not None and grammar.finished):
            reason = "stop"
        elif len(known) >= request.max_length:
            reason = "length"
        elif request.jumps and grammar is not None and (forced := grammar.forced()) is not None:
            accepted = grammar.accept(forced)
            assert accepted, f"the grammar forces token {forced}, but does not accept it"
            token = forced
            known.append(token)
            tokens.append(token)
            continue
        break
    output = RequestOutput(
        request.serial,
        tokens,
        reason,
        request.prompt_length,
        len(known) - request.prompt_length,
        request.cached or 0,
        "",
        "",
        _NO_LOGPROBS if logprobs is None else [logprobs],
        request.prompt_logprobs,
    )
    if request.prompt_logprobs:
        request.prompt_logprobs = []
    return output


def _no_token(request: Request) -> str:
    sampling = request.sampling
    if sampling.allowed_token_ids or sampling.bad_words_ids:
        return "every token is forbidden by allowed_token_ids, bad_words_ids and what else the request asks for"
    return "the model's logits are not finite numbers"


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
