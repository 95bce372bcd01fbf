"""Log probabilities of tokens by the model's own distribution: before temperature, penalties, biases and grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_worker.records.output import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of S tokens and of K alternatives to each.

    Attributes:
        chosen: float32 [S]: the tokens' own.
        top_ids: int64 [S, K]: the likeliest tokens, likeliest first.
        top: float32 [S, K]: their log probabilities.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``chosen``, ``top_ids`` and ``top``."""
        return self.chosen, self.top_ids, self.top

    def to_list(self, alternatives: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """The log probabilities as records; waits for the device.

        Args:
            alternatives: How many of the K are wanted for each token; None: all.
        """
        counts = [self.top.shape[1]] * len(self.chosen) if alternatives is None else alternatives
        columns = zip(self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), counts, strict=True)
        return [TokenLogprobs(chosen, ids[:count], top[:count]) for chosen, ids, top, count in columns]


class Distribution:
    """The log softmax of some rows, kept until it is known which tokens were chosen.

    Args:
        logits: float32 [S, V]; not changed, and must not be changed by others.
        alternatives: K, the number of alternatives.
    """

    def __init__(self, logits: Tensor, alternatives: int) -> None:
        self._logits = logits
        self._total = logits.logsumexp(-1, keepdim=True)
        self._top = logits.topk(alternatives, dim=-1)

    def of(self, tokens: Tensor) -> Logprobs:
        """The log probabilities of one token of each row, int64 [S]."""
        chosen = self._logits.gather(1, tokens[:, None]) - self._total
        return Logprobs(chosen[:, 0], self._top.indices, self._top.values - self._total)


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenates parts, at least one, which have the same K."""
    chosen, top_ids, top = (torch.cat(tensors) for tensors in zip(*(part.tensors for part in parts), strict=True))
    return Logprobs(chosen, top_ids, top)
