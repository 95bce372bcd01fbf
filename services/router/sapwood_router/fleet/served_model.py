"""What a worker serves."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from sapwood_router.request.embed_request import Labels


class Role(enum.Enum):
    """Which part of a request a worker computes, if there is a choice."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a worker serves.

    Attributes:
        epoch: Differs after a restart.
        max_running: Requests that it runs at once; 0 if it does not say.
        embedded_tokens: The worker cuts inputs to embed to this many tokens; 0: longer ones than the context are refused.
        eos_token_ids: The model's own end tokens.
        shortened: Lengths that embeddings may be cut to; empty: any length; None: they cannot be cut.
        role: Which part of a request it does.
        pages: A hash of everything besides tokens that its pages depend on: a worker with another value cannot continue its
            prompts. Empty: it does not say.
        labels: The labels of its head; it then makes neither embeddings nor text. None: it has no such head.
        sampling_defaults: Settings of sampling for requests that do not set them, as the model's files give them.
        lora_slots: Adapters that it holds on its device at once; 0: it serves none.
        resolves_loras: Whether it looks for adapters that it does not know.
        weights: Stands for its weights in the names of pages; empty: they are those that it started with.
        weight_version: What they are called; empty: it does not say.
        asleep: Whether it has given memory back, and refuses requests.
    """

    model: str
    context_length: int
    vocab_size: int
    page_size: int
    num_pages: int
    epoch: int
    max_running: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    embedding_size: int = 0
    embedded_tokens: int = 0
    shortened: frozenset[int] | None = None
    labels: Labels | None = None
    role: Role = Role.BOTH
    pages: bytes = b""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict, hash=False)
    lora_slots: int = 0
    resolves_loras: bool = False
    weights: bytes = b""
    weight_version: str = ""
    asleep: bool = False
