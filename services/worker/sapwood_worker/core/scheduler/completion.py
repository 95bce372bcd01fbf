"""Appends sampled tokens to their request, with those that a grammar then forces; ends the request if it must; reports.

O(1) a token. Forced tokens are computed in the next step together, as a chunk of a prompt is.
"""

from __future__ import annotations

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.grammar_state import GrammarState
from sapwood_worker.records.output import FinishReason, RequestOutput, TokenLogprobs

_NO_LOGPROBS: list[TokenLogprobs] = []


def stop_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids


def may_jump(request: Request) -> bool:
    """Whether tokens that the request's grammar forces may be appended without asking the model.

    They may not if log probabilities are asked for, or if the runner counts tokens (penalties), bans
    some or calls logit processors.
    """
    sampling = request.sampling
    unbiased = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    free = not (
        sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words_ids or sampling.logit_processors
    )
    return request.grammar is not None and sampling.logprobs is None and unbiased and free


def take_tokens(request: Request, sampled: list[int], logprobs: list[TokenLogprobs] = _NO_LOGPROBS) -> RequestOutput:
    """Appends the tokens that a step sampled, up to one that ends the request, and those that the grammar forces then.

    The caller ends the request if the answer has a ``finish_reason``.

    Args:
        request: The tokens' request. Mutated.
        sampled: At least one; becomes part of the answer. -1: the model's logits were not finite numbers; the request has
            failed and nothing more of it is shared.
        logprobs: The tokens' log probabilities, if asked for.
    """
    grammar = request.grammar
    known = request.token_ids
    before = len(known)
    reason: FinishReason | None = None
    error = field = ""
    for token in sampled:
        if token < 0:
            request.shared = False
            reason, (error, field) = "error", _no_token(request)
            break
        if grammar is not None and not grammar.accept(token):
            reason, error, field = "error", f"grammar: {grammar.error}", "grammar"
            break
        known.append(token)
        if token in request.stops or (grammar is not None and grammar.finished):
            reason = "stop"
            break
        if len(known) >= request.max_length:
            reason = "length"
            break
    if reason is None and request.jumps and grammar is not None:
        reason = _jump(request, grammar)
    taken = len(known) - before
    output = RequestOutput(
        request.serial,
        sampled if taken == len(sampled) else known[before:].tolist(),
        reason,
        request.prompt_length,
        len(known) - request.prompt_length,
        request.cached or 0,
        error,
        field,
        logprobs[:taken] if logprobs else logprobs,
        request.prompt_logprobs,
        drafted_tokens=0 if request.drafts is None else request.drafts.drafted,
        accepted_tokens=0 if request.drafts is None else request.drafts.accepted,
    )
    if request.prompt_logprobs:
        request.prompt_logprobs = []
    return output


def _jump(request: Request, grammar: GrammarState) -> FinishReason | None:
    """Appends the tokens that the grammar forces; returns why the request ends, if it does."""
    while (token := grammar.forced()) is not None:
        accepted = grammar.accept(token)
        assert accepted, f"the grammar forces token {token}, but does not accept it"
        request.token_ids.append(token)
        if token in request.stops or grammar.finished:
            return "stop"
        if len(request.token_ids) >= request.max_length:
            return "length"
    return None


def _no_token(request: Request) -> tuple[str, str]:
    """Why nothing could be sampled, and the field at fault if the request is."""
    sampling = request.sampling
    if sampling.logit_processors:
        why = request.failure or "the logit processors left no token: all logits are forbidden or not finite numbers"
        return why, "sampling.logit_processors"
    if sampling.allowed_token_ids or sampling.bad_words_ids:
        return "every token is forbidden by allowed_token_ids, bad_words_ids and what else the request asks for", ""
    return "the model's logits are not finite numbers", ""


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
