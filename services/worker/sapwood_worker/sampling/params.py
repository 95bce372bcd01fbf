"""How a request wants its tokens chosen, validated and with defaults filled in."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one request.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: Drop tokens less likely than this times the likeliest, in [0, 1].
        seed: With a token's position it decides the token: the same request gives the same tokens in any batch.
        max_tokens: The most tokens to generate, at least 1.
        stop_token_ids: Generation ends at any of these; the ending token is part of the output.
        ignore_eos: Do not end at the model's own end tokens.
        frequency_penalty: Subtracted from a token's logit for each time it is in the output.
        presence_penalty: Subtracted from the logit of each token that is in the output.
        repetition_penalty: The logit of each token in prompt or output is divided by it if positive, else multiplied; over 0.
        logit_bias: Token ids, each once, and what is added to their logits.
        min_tokens: No end token before so many tokens of output.
        logprobs: Log probabilities of the output, and of so many of the likeliest alternatives; None: none.
        prompt_logprobs: The same for the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
