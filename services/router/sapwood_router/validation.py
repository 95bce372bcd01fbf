"""Checks of what a client asked for that need no other service. Each error names the field as the client spells it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.context import ChatPrompt, FieldNames, Prompt, Sampling, TextPrompt

MAX_STOP = 16
MAX_N = 128
MAX_EMBEDDED = 2048
MAX_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGPROBS = 20
_UINT32 = 2**32
_UINT64 = 2**64
_INT32_MAX = 2**31 - 1


def check_prompt(prompt: Prompt, fields: FieldNames) -> None:
    """Refuses an empty prompt and token ids that are no token ids.

    Raises:
        InvalidArgumentError: As said.
    """
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidArgumentError("the prompt is empty", field=fields.prompt)
    elif isinstance(prompt, ChatPrompt):
        if not prompt.turns:
            raise InvalidArgumentError("the conversation is empty", field=fields.prompt)
    else:
        check_token_ids(prompt.token_ids, fields.prompt)


def check_token_ids(token_ids: Sequence[int], field: str) -> None:
    """Refuses none at all, and what is no token id.

    Raises:
        InvalidArgumentError: As said.
    """
    if not token_ids:
        raise InvalidArgumentError("the prompt is empty", field=field)
    if not 0 <= min(token_ids) <= max(token_ids) < _UINT32:
        raise InvalidArgumentError("token ids must be in 0..4294967295", field=field)


def check_stop(stop: tuple[str, ...], field: str = "stop") -> None:
    """Refuses more than 16 stop strings, and an empty one.

    Raises:
        InvalidArgumentError: As said.
    """
    if len(stop) > MAX_STOP:
        raise InvalidArgumentError(f"at most {MAX_STOP} stop strings, got {len(stop)}", field=field)
    if not all(stop):
        raise InvalidArgumentError("a stop string is empty", field=field)


def check_tokens_only(prompt: Prompt, stop: tuple[str, ...]) -> None:
    """Refuses what needs the text of an answer that is to be token ids alone.

    Raises:
        InvalidArgumentError: As said.
    """
    if stop:
        raise InvalidArgumentError("stop needs the text, which detokenize false leaves out", field="stop")
    if isinstance(prompt, ChatPrompt) and prompt.tools:
        raise InvalidArgumentError("tools need the text, which detokenize false leaves out", field="tools")


def check_sampling(sampling: Sampling, fields: FieldNames) -> None:
    """Refuses sampling settings out of their ranges (those of ``common.proto``).

    Raises:
        InvalidArgumentError: As said.
    """
    prefix = fields.sampling
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    if temperature is not None and not (0 <= temperature < math.inf):
        raise InvalidArgumentError(f"temperature must be at least 0, got {temperature:g}", field=f"{prefix}temperature")
    if sampling.top_k is not None and not 1 <= sampling.top_k <= _INT32_MAX:
        raise InvalidArgumentError(f"top_k must be at least 1, got {sampling.top_k}", field=f"{prefix}top_k")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidArgumentError(f"top_p must be in (0, 1], got {top_p:g}", field=f"{prefix}top_p")
    if min_p is not None and not 0 <= min_p <= 1:
        raise InvalidArgumentError(f"min_p must be in [0, 1], got {min_p:g}", field=f"{prefix}min_p")
    if sampling.seed is not None and not 0 <= sampling.seed < _UINT64:
        raise InvalidArgumentError("seed must fit 64 bits", field=f"{prefix}seed")
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= _INT32_MAX:
        raise InvalidArgumentError(f"max_tokens must be at least 1, got {sampling.max_tokens}", field=fields.max_tokens)
    _check_adjustments(sampling, fields)
    stop_tokens = sampling.stop_token_ids
    if len(stop_tokens) > MAX_STOP_TOKENS:
        raise InvalidArgumentError(
            f"at most {MAX_STOP_TOKENS} stop tokens, got {len(stop_tokens)}", field=f"{prefix}stop_token_ids"
        )
    if any(not 0 <= token < _UINT32 for token in stop_tokens):
        raise InvalidArgumentError("stop_token_ids must be token ids", field=f"{prefix}stop_token_ids")


def check_n(n: int, fields: FieldNames) -> None:
    """Refuses a number of continuations out of range.

    Raises:
        InvalidArgumentError: As said.
    """
    if not 1 <= n <= MAX_N:
        raise InvalidArgumentError(f"n must be in 1..{MAX_N}, got {n}", field=f"{fields.sampling}n")


def _check_adjustments(sampling: Sampling, fields: FieldNames) -> None:
    prefix = fields.sampling
    for name, penalty in (
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
    ):
        if penalty is not None and not -2 <= penalty <= 2:
            raise InvalidArgumentError(f"{name} must be in [-2, 2], got {penalty:g}", field=prefix + name)
    repetition = sampling.repetition_penalty
    if repetition is not None and not 0 < repetition < math.inf:
        name = "repetition_penalty"
        raise InvalidArgumentError(f"{name} must be over 0, got {repetition:g}", field=prefix + name)
    bias = sampling.logit_bias
    if len(bias) > MAX_BIASES:
        raise InvalidArgumentError(f"at most {MAX_BIASES} tokens, got {len(bias)}", field=f"{prefix}logit_bias")
    for token, value in bias.items():
        if not 0 <= token < _UINT32 or not -100 <= value <= 100:
            raise InvalidArgumentError(
                f"logit_bias maps token ids to numbers in [-100, 100], got {token}: {value:g}",
                field=f"{prefix}logit_bias",
            )
    least, most = sampling.min_tokens, sampling.max_tokens
    if least is not None and not 0 <= least <= (_INT32_MAX if most is None else most):
        raise InvalidArgumentError(
            f"min_tokens must be in 0..{_INT32_MAX if most is None else most}, got {least}", field=f"{prefix}min_tokens"
        )
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidArgumentError(f"{name} must be in 0..{MAX_LOGPROBS}, got {count}", field=prefix + name)
