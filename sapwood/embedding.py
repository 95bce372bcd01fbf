"""The request for embeddings and its answer, as plain Python values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from sapwood.v1 import common_pb2, router_pb2, worker_pb2

Pooling = Literal["mean", "last", "cls"]

_POOLING = {"mean": worker_pb2.POOLING_MEAN, "last": worker_pb2.POOLING_LAST, "cls": worker_pb2.POOLING_CLS}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in order."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    model: str


class EmbedOptions(TypedDict, total=False):
    """How inputs become vectors; what is left out, or None, is as the model has it.

    Attributes:
        model: The model's name; the only one there is if left out.
        pooling: How a sequence becomes one vector.
        normalize: Whether each vector has length 1.
        dimensions: Cuts each vector to this many numbers, where the model's files say that they may be cut.
        truncate_prompt_tokens: Cuts longer inputs to this many tokens; -1: to what the context holds.
        prompt_name: The prompt of the model's files that goes before each text; "": none.
    """

    model: str | None
    pooling: Pooling | None
    normalize: bool | None
    dimensions: int | None
    truncate_prompt_tokens: int | None
    prompt_name: str | None


def build_embed_request(
    inputs: str | Iterable[str | Iterable[int]], options: EmbedOptions
) -> router_pb2.RouterEmbedRequest:
    """The request message.

    Raises:
        ValueError: There is no such option or pooling, or a token id is beyond what its field can hold.
        TypeError: An input is neither text nor token ids.
    """
    given: dict[str, Any] = dict(options)
    if (pooling := given.pop("pooling", None)) is not None and pooling not in _POOLING:
        raise ValueError(f"pooling is one of {', '.join(_POOLING)}, not {pooling!r}")
    if not isinstance(inputs, Iterable):
        raise TypeError(
            f"inputs: {inputs!r:.60} cannot be its value; it takes a text, or a list of texts and token ids"
        )
    return router_pb2.RouterEmbedRequest(
        input=[_input(item) for item in ([inputs] if isinstance(inputs, str) else inputs)],
        pooling=None if pooling is None else _POOLING[pooling],
        **given,
    )


def to_embeddings(response: router_pb2.RouterEmbedResponse) -> Embeddings:
    """The vectors of a response."""
    vectors = tuple(tuple(item.values) for item in response.embeddings)
    return Embeddings(vectors, response.prompt_tokens, response.model)


def _input(item: str | Iterable[int]) -> router_pb2.EmbedInput:
    if isinstance(item, str):
        return router_pb2.EmbedInput(text=item)
    return router_pb2.EmbedInput(tokens=common_pb2.TokenIds(ids=item))
