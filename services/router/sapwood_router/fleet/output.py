"""What a worker says of one request, as plain values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sapwood_router.request.context import FinishReason
from sapwood_router.request.logprobs import Likelihoods, TokenLogprobs
from sapwood_router.transport.held_tickets import HeldTicket


class WorkerOutput(msgspec.Struct):
    """One message's news of a request.

    Attributes:
        token_ids: New tokens; an end token is among them.
        finish: Why the generation ended, on the last one.
        logprobs, prompt_logprobs: As asked for: one for each of the tokens; one for each of the prompt's but the first.
        cached_tokens: Prompt tokens found in the worker's prefix cache, where the message says.
        accepted_prediction_tokens, rejected_prediction_tokens: Drafted tokens that were and were not output so far; the same.
        announced: Pages of the prompt that another worker may read already; the ticket names them again.
        position: How many tokens of the worker's output came before ``token_ids``; None: it does not say.
        total: How many tokens its output has, on the last one; None: it does not say.
        ticket: The worker is done with the prompt, and another is to go on; whoever takes this releases it.
    """

    token_ids: Sequence[int]
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[Likelihoods] = ()
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    announced: HeldTicket | None = None
    ticket: HeldTicket | None = None
    position: int | None = None
    total: int | None = None
