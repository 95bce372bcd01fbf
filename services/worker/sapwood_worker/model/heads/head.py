"""What every head has that drafts from a model's hidden states."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.records.kv_layout import KVLayout


class Head(Layer):
    """A head, as a runner runs it.

    Position p of a head has the token at p + 1 and the model's features of p. Where the model has not computed p, the head's own
    output at the position before stands for the features.

    Args:
        config: The configuration of its one layer, the last that the model's names; ``vocab_size`` is the model's.
        taken: The layers of the model whose inputs the features are made of; the number of layers stands for the last one's
            output.

    Attributes:
        config, taken: The arguments.
        store: [slots, hidden_size]: the features, by the cache's slots; set before it is run.
    """

    def __init__(self, config: ModelConfig, taken: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.taken = taken
        self.store: Tensor

    @abstractmethod
    def layout(self, dtype: str, page_size: int) -> KVLayout:
        """What a token leaves in its cache, in numbers of ``dtype``, by torch's name."""

    @abstractmethod
    def mix(self, states: Tensor) -> Tensor:
        """The features of tokens, [T, hidden_size], of the taken hidden states side by side."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """What it makes of each token and the features of the position before, which is the one that ``positions`` name.

        Args:
            token_ids: int64 [T].
            positions: int64 [T].
            plan: The step's attention.

        Returns:
            [T, hidden_size]: good for :meth:`logits`, and as the features of the position after.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size of the model], -inf for tokens that it does not know."""
