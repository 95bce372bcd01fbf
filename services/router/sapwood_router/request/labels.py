"""What a model that classifies tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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
