"""What a client wants embedded, and what it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_router.request.caller import NOBODY, Caller


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """What a client wants embedded.

    Attributes:
        request_id: For logs.
        inputs: Each a text or token ids.
        names: How the client calls each input.
        model: None for the only one there is.
        pooling: "mean", "last", "cls"; None for the model's own.
        normalize: Whether each vector is to have length 1; None for the worker's default.
        dimensions: How many numbers the client expects; None does not care.
        max_tokens: Longer inputs are cut to so many; -1: to what the context holds; None: as the model's files say.
        deadline: On the event loop's clock.
        caller: Who asks.
    """

    request_id: str
    inputs: Sequence[str | list[int]]
    names: Sequence[str]
    model: str | None
    pooling: str | None
    normalize: bool | None
    dimensions: int | None
    max_tokens: int | None
    deadline: float
    caller: Caller = NOBODY


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors, one for each input, and what they cost."""

    model: str
    vectors: list[Sequence[float]]
    prompt_tokens: int
