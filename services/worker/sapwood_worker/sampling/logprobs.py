"""Log probabilities of tokens by the model's own distribution: before temperature, penalties, biases and grammar."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sapwood_worker.scheduler.output import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of S tokens, on the device.

    Attributes:
        chosen: float32 [S].
        top_ids: int64 [S, K], likeliest first.
        top: float32 [S, K].
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def to_list(self, alternatives: list[int]) -> list[TokenLogprobs]:
        """As plain data; waits for the device.

        Args:
            alternatives: How many of the K are wanted for each token.
        """
        columns = zip(self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), alternatives, strict=True)
        return [TokenLogprobs(chosen, ids[:count], top[:count]) for chosen, ids, top, count in columns]


class Distribution:
    """The log softmax of some rows, kept until it is known which tokens were chosen.

    Args:
        logits: float32 [S, V]; not changed, and must not be changed by others.
        alternatives: K.
    """

    def __init__(self, logits: Tensor, alternatives: int) -> None:
        self._logits = logits
        self._total = logits.logsumexp(-1, keepdim=True)
        self._top = logits.topk(alternatives, dim=-1)

    def of(self, tokens: Tensor) -> Logprobs:
        """The log probabilities of one token a row, int64 [S]."""
        chosen = self._logits.gather(1, tokens[:, None]) - self._total
        return Logprobs(chosen[:, 0], self._top.indices, self._top.values - self._total)


def prompt_logprobs(logits: Tensor, tokens: Tensor, alternatives: int) -> list[TokenLogprobs]:
    """Those of ``tokens`` int64 [S], each by its row of ``logits`` float32 [S, V]; waits for the device."""
    found = Distribution(logits, alternatives).of(tokens)
    return found.to_list([alternatives] * len(tokens))
