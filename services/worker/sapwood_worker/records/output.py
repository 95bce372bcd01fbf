"""The results of a step for a request, as the scheduler sends them to the front."""

from __future__ import annotations

from typing import Literal

import msgspec

from sapwood_worker.records.handoff import HandoffTicket


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token, and the likeliest tokens at its place.

    Attributes:
        logprob: Natural logarithm.
        top_ids: Likeliest first.
        top_logprobs: One for each of ``top_ids``.
    """

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


Pooling = Literal["", "mean", "last", "cls", "labels"]
"""``labels``: the last token's logits, one for each label of the model's head."""


FinishReason = Literal["stop", "length", "error", "deadline", "handoff", "abort"]
"""``stop``: an end token or the end of the grammar. ``length``: max_tokens or the context's end. ``error``: runner or grammar
failed. ``deadline``: it did not end in time. ``handoff``: another worker will continue it. ``abort``: the
weights that computed it have been exchanged."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The results of one step for one request.

    Attributes:
        serial: The request's serial number.
        token_ids: New tokens; an end token is among them.
        finish_reason: Set once, on the request's last output.
        prompt_tokens: Length of the prompt.
        completion_tokens: Tokens of output so far.
        cached_tokens: Prompt tokens found in the prefix cache.
        error: The error message, if ``finish_reason`` is ``error``.
        error_field: The request field at fault, if the error is its sender's.
        logprobs: One for each of ``token_ids``, if asked for.
        prompt_logprobs: On the first output, if asked for: one for each prompt token after ``prompt_logprobs_start``.
        index: The number of the choice that it belongs to; the gRPC front sets it.
        embedding: Native float32, on the output of an embedding request.
        drafted_tokens: Tokens that were drafted for it so far.
        accepted_tokens: How many of these became part of its output.
        ticket: The ticket for its prompt's pages: for all pages if ``finish_reason`` is ``handoff``, else for new pages only.
        weights: The number of the weights that have computed ``token_ids``; the gRPC front sets it.
    """

    serial: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    error_field: str = ""
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    index: int = 0
    embedding: bytes = b""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ticket: HandoffTicket | None = None
    weights: int = 0
