"""The figures of each task's scored items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood.evaluation.evaluate import Scored
from sapwood.evaluation.items import Choice


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A task's figures.

    Attributes:
        items: Items that were answered.
        accuracy: The share of them that is right; None of none.
        standard_error: That share's, for items drawn from many: sqrt(p (1 - p) / (n - 1)); None for fewer than two.
        accuracy_by_length: The same where the likeliest choice for each byte of its length counts; None without choices.
        failed: Items without an answer; they count in none of the above.
        error: Why the first of these failed.
    """

    items: int
    accuracy: float | None
    standard_error: float | None
    accuracy_by_length: float | None
    failed: int
    error: str


def accuracies(scored: Sequence[Scored]) -> dict[str, Accuracy]:
    """The figures of each task, in the order of their names."""
    names = sorted({each.item.task for each in scored})
    return {name: _accuracy([each for each in scored if each.item.task == name]) for name in names}


def _accuracy(scored: Sequence[Scored]) -> Accuracy:
    answered = [each for each in scored if not each.error]
    failed = [each for each in scored if each.error]
    count = len(answered)
    share = sum(each.right for each in answered) / count if count else None
    choices = any(isinstance(each.item, Choice) for each in answered)
    return Accuracy(
        items=count,
        accuracy=share,
        standard_error=None if share is None or count < 2 else (share * (1 - share) / (count - 1)) ** 0.5,
        accuracy_by_length=sum(each.right_by_length for each in answered) / count if choices else None,
        failed=len(failed),
        error=failed[0].error if failed else "",
    )
