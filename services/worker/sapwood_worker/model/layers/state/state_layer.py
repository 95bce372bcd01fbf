"""What layers with a state have in common: their configuration, their place in a decoder layer, and the short convolution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from sapwood_worker.model.attention.backend import AttentionPlan
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.linear import RankSum
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.layers.rotary import Angles


class StateLayer(Layer, ABC):
    """A layer in the place of attention, or beside it.

    Attributes:
        ranks: Sums what ranks have of the output; None: there is one.
    """

    ranks: RankSum | None

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        norm: AnyNorm | None,
        angles: Angles,
        plan: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one.

        Advances the step's states.
        """


class StateConfig(Protocol):
    """What a kind of layer with a state is built from.

    Attributes:
        name: What checkpoints call the layer.
        numbers: Numbers of a request's state in one layer.
        heads: In how many equal parts the state can be split over ranks.
    """

    @property
    def name(self) -> str: ...

    @property
    def numbers(self) -> int: ...

    @property
    def heads(self) -> int: ...

    def build(self, hidden_size: int, index: int, context: LayerContext) -> StateLayer:
        """Makes the layer.

        Args:
            hidden_size: Width of the residual stream.
            index: The layer's.
            context: Where and how it is built.
        """
        ...


def convolve(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel with a few taps of its own.

    Args:
        x: float32 [B, T, C].
        before: float32 [B, C, K - 1]: the inputs before these.
        weight: float32 [C, K]; the last tap is that of the input itself.
        bias: float32 [C]; None: there is none.

    Returns:
        The result, [B, T, C], and the last K - 1 inputs, [B, C, K - 1].
    """
    every = torch.cat((before.transpose(1, 2), x), 1)
    count, taps = x.shape[1], weight.shape[1]
    out = every[:, :count] * weight[:, 0]
    for tap in range(1, taps):
        out.addcmul_(every[:, tap : tap + count], weight[:, tap])
    if bias is not None:
        out += bias
    return out, every[:, count:].transpose(1, 2)


def decays(rates: Tensor) -> tuple[Tensor, Tensor]:
    """How much of a state is left after some tokens.

    Sums are in float64: with those of float32 the differences of large ones would lose most of their digits.

    Args:
        rates: float32 [..., T], at most 0: the logarithm of each token's factor.

    Returns:
        What is left of the state before the tokens after each of them, [..., T]; and of what token j wrote after token i,
        [..., i, j], 0 for j > i.
    """
    total = rates.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().float().exp().tril()
    return total.float().exp(), between
