"""A head that drafts from a model's hidden states, and what the model keeps for it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.layers.layer import Layer
from sapwood_worker.records.kv_layout import KVLayout
from sapwood_worker.records.step import Step

# How a head's steps are shifted: at position p, where the model has token p, a head has token p + 1.
#
# The scheduler plans a head's steps as a draft model's, by the tokens' own positions. A head computes each token a
# position earlier, in the slot where the model has left its features. What it makes of a request's last token it leaves
# in the slot after that, which the model has not computed yet: there the step that drafts on finds it.


class ShiftedSteps:
    """Shifts a head's steps.

    Args:
        store: [slots, hidden_size]: the features.
        page_size: Tokens in a page.
        scratch: A slot that no token has.
    """

    def __init__(self, store: Tensor, page_size: int, scratch: int) -> None:
        self._store = store
        self._page_size = page_size
        self._scratch = scratch

    def shift(self, step: Step) -> Step:
        """The step as the head computes it. None of its parts may begin at position 0."""
        return replace(step, starts=step.starts - 1)

    def left(self, step: Step) -> npt.NDArray[np.int64]:
        """int64 [T]: the slot for the head's output of each token, in a step before the shift. If the step drafts, this is the
        slot after the last token of each part; all other tokens use the scratch slot.
        """
        slots = np.full(len(step.token_ids), self._scratch, np.int64)
        if step.samples.all():
            last, size = step.starts + step.counts - 1, self._page_size
            pages = step.pages[np.arange(len(last)), last // size].astype(np.int64)
            slots[np.cumsum(step.counts) - 1] = pages * size + last % size
        return slots

    def slots(
        self, first: npt.NDArray[np.int64], pages: npt.NDArray[np.int32], count: int, wanted: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """int64 [count, P]: the slots of positions from ``first``, int64 [P], on; no token's from the ``wanted``-th on.

        Args:
            first, wanted: int64 [P].
            pages: int32 [P, W]: the pages of the wanted ones, at least.
            count: How many of each.
        """
        places = np.arange(count)[:, None]
        at = np.where(places < wanted, first + places, 0)
        slots = pages[np.arange(len(first)), at // self._page_size].astype(np.int64) * self._page_size
        return np.where(places < wanted, slots + at % self._page_size, self._scratch)

    def leave(self, hidden: Tensor, slots: Tensor) -> None:
        """Leaves what the head made, [T, hidden_size], in slots, int64 [T]."""
        self._store.index_copy_(0, slots, hidden)


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
        """The layout of its cache, with numbers of ``dtype``, by torch's name."""

    @abstractmethod
    def mix(self, states: Tensor) -> Tensor:
        """The features of tokens, [T, hidden_size], of the taken hidden states side by side."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """The head's output for each token, from the token and the features of the position before; ``positions`` name that
        position.

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
