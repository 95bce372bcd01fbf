"""Routing: which experts each token goes to, and with what weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits choose experts.

    Attributes:
        experts: How many there are: E.
        chosen: How many each token goes to: k.
        scores: The function from logits to scores: ``softmax`` over all experts, or ``sigmoid`` of each.
        renormalise: Whether a token's weights are divided by their sum.
        scale: Factor of the weights, after that.
        groups: Groups of experts that lie side by side; a token chooses groups first.
        chosen_groups: How many of them; those of the largest scores.
        group_score: A group's score: that of its best expert (``best``), or the sum of its two best (``two_best``).
        shared: Experts after the E that every token goes to besides, with a weight of 1.
    """

    experts: int
    chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["best", "two_best"] = "best"
    shared: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError if the numbers do not fit together."""
        if not 0 < self.chosen <= self.experts:
            raise ValueError(f"a token cannot go to {self.chosen} of {self.experts} experts")
        if self.experts % self.groups or not 0 < self.chosen_groups <= self.groups:
            raise ValueError(
                f"{self.chosen_groups} of {self.groups} groups cannot be chosen among {self.experts} experts"
            )
        members = self.experts // self.groups
        if self.chosen > self.chosen_groups * members or (
            self.group_score == "two_best" and members < 2 <= self.groups
        ):
            raise ValueError(f"groups of {members} experts are too small")


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses each token's experts.

    Args:
        logits: float32 [T, E].
        routing: How.
        correction: float32 [E], added to scores where experts are chosen, but not to the weights; None: 0.

    Returns:
        The experts, int64 [T, k + shared], those that are chosen in no order, and their weights, float32 [T, k + shared].

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2; groups: "DeepSeek-V2", section 2.1.3.
    """
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    eligible = scores if correction is None else scores + correction
    if routing.groups > routing.chosen_groups:
        eligible = _in_best_groups(eligible, routing)
    ids = eligible.topk(routing.chosen, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # a sum of sigmoids may be 0
    weights = weights if routing.scale == 1.0 else weights * routing.scale
    if not routing.shared:
        return ids, weights
    shared = torch.arange(routing.experts, routing.experts + routing.shared, device=ids.device).expand(len(ids), -1)
    return torch.cat((ids, shared), 1), torch.cat((weights, torch.ones_like(shared, dtype=weights.dtype)), 1)


def _in_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores, minus infinity outside each token's best groups."""
    grouped = scores.view(len(scores), routing.groups, -1)
    best = grouped.topk(2 if routing.group_score == "two_best" else 1, -1).values.sum(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(1, best.topk(routing.chosen_groups, -1, sorted=False).indices, True)
    return grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1)
