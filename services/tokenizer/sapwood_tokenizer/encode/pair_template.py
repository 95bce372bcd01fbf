"""The special tokens that a tokenizer puts around the two texts of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The tokens before the first text, between the texts, and after the second."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]


def read_pair_template(tokenizer: Tokenizer) -> PairTemplate | None:
    """What the tokenizer's post-processor does with pairs; None if its vocabulary has no tokens to try it with."""
    encoding = tokenizer.encode("a", "b")
    found: dict[int | None, list[tuple[int, ...]]] = {None: [], 0: [], 1: []}
    parts: list[tuple[int | None, tuple[int, ...]]] = [
        (which, tuple(token for _, token in group))
        for which, group in groupby(zip(encoding.sequence_ids, encoding.ids, strict=True), key=lambda item: item[0])
    ]
    for which, tokens in parts:
        found[which].append(tokens)
    order = [which for which, _ in parts if which is not None]
    if order != [0, 1]:
        return None
    first, second = (next(index for index, (which, _) in enumerate(parts) if which == text) for text in (0, 1))
    return PairTemplate(
        before=parts[0][1] if first else (),
        between=parts[first + 1][1] if second - first > 1 else (),
        after=parts[-1][1] if second < len(parts) - 1 else (),
    )
