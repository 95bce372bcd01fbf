"""The request to classify texts and its answer, as plain Python values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from sapwood.v1 import common_pb2, router_pb2


@dataclass(frozen=True, slots=True)
class Classifications:
    """A score for each label, for each input in order."""

    scores: tuple[tuple[float, ...], ...]
    labels: tuple[str, ...]
    prompt_tokens: int
    model: str

    def best(self) -> list[str]:
        """The label that fits each input best."""
        return [self.labels[max(range(len(each)), key=each.__getitem__)] for each in self.scores]


class ClassifyOptions(TypedDict, total=False):
    """How inputs are classified.

    Attributes:
        model: The model's name; the only one there is if left out.
        raw: Whether logits are wanted instead of what the model's activation makes of them.
        truncate_prompt_tokens: Cuts longer inputs to this many tokens, of a pair the second text; -1: to what the context holds.
    """

    model: str | None
    raw: bool
    truncate_prompt_tokens: int | None


def build_classify_request(
    inputs: str | Iterable[str | tuple[str, str] | Sequence[int]], options: ClassifyOptions
) -> router_pb2.ClassifyRequest:
    """The request message.

    Raises:
        ValueError: There is no such option, or a token id is beyond what its field can hold.
        TypeError: An input is neither text, nor two texts, nor token ids.
    """
    if not isinstance(inputs, Iterable):
        raise TypeError(
            f"inputs: {inputs!r:.60} cannot be its value; it takes a text, or a list of texts, pairs and token ids"
        )
    given = [inputs] if isinstance(inputs, str) else inputs
    return router_pb2.ClassifyRequest(input=map(_input, given), **options)


def to_classifications(response: router_pb2.ClassifyResponse) -> Classifications:
    """The scores of a response."""
    scores = tuple(tuple(item.scores) for item in response.classifications)
    return Classifications(scores, tuple(response.labels), response.prompt_tokens, response.model)


def _input(item: str | tuple[str, str] | Sequence[int]) -> router_pb2.ClassifyInput:
    if isinstance(item, str):
        return router_pb2.ClassifyInput(text=item)
    match item:
        case (str() as first, str() as second):
            return router_pb2.ClassifyInput(pair=router_pb2.TextPair(first=first, second=second))
        case _:
            return router_pb2.ClassifyInput(tokens=common_pb2.TokenIds(ids=item))
