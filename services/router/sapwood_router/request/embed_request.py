"""A request for embeddings or classification, and its answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sapwood_router.request.caller import NOBODY, Caller


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a model's head.

    Attributes:
        names: In the order of the head's logits.
        activation: What makes scores of logits; ``none``: they are scores.
    """

    names: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "none"]

    def scores(self, logits: Sequence[float]) -> list[float]:
        """One for each label. O(labels)."""
        if self.activation == "none":
            return list(logits)
        if self.activation == "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        largest = max(logits)
        parts = [math.exp(logit - largest) for logit in logits]
        total = sum(parts)
        return [part / total for part in parts]


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    part = math.exp(logit)  # of a large number it would be too large
    return part / (1 + part)


class TextPair(NamedTuple):
    """Two texts that a model compares."""

    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """What a client wants embedded.

    Attributes:
        request_id: For logs.
        inputs: Each a text, token ids or, to classify only, a pair of texts; none is empty.
        names: How the client calls each input.
        model: None for the only one there is.
        pooling: "mean", "last", "cls"; None for the model's own.
        normalize: Whether each vector is to have length 1; None for the worker's default.
        dimensions: How many numbers the client expects; None does not care.
        max_tokens: Longer inputs are cut to this many tokens; -1: to the context; None: to the length in the model's files.
        prompt_name: The prompt of the model's files that goes before each text; "": none; None: the files' default.
        deadline: On the event loop's clock.
        caller: Who asks.
        lora: The adapter; empty: the one that ``model`` names, if any.
        classifies: Whether the logits of the model's labels are wanted; pooling, normalize and dimensions are None then.
    """

    request_id: str
    inputs: Sequence[str | list[int] | TextPair]
    names: Sequence[str]
    model: str | None
    deadline: float
    max_tokens: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    caller: Caller = NOBODY
    classifies: bool = False
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors, one for each input, and the usage; ``labels``: for a classification, the labels of the logits."""

    model: str
    vectors: list[Sequence[float]]
    prompt_tokens: int
    labels: Labels | None = None
