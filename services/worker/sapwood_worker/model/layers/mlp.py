"""The MLP, with a gate and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.linear import ColumnLinear, RowLinear
from sapwood_worker.model.layers.norm import AnyNorm
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots


class GatedMLP(Layer):
    """``down(activation(gate(x)) * up(x))``.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width of gate and up.
        activation: The gate's activation.
        bias: Whether the projections have biases.
        context: Where and how it is built.
        summed: Whether the ranks' outputs are summed here; else the caller sums them.

    Attributes:
        ranks: Sums the ranks' outputs; None: there is one rank, or the caller sums.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Gate,
        bias: bool,
        context: LayerContext,
        summed: bool = True,
    ) -> None:
        super().__init__()
        inner = context.parallel.shard("intermediate_size", intermediate_size)
        self.gate_up = ColumnLinear(hidden_size, {"gate_proj": inner, "up_proj": inner}, bias, context)
        self.down = RowLinear(inner, "down_proj", hidden_size, bias, context, summed=summed)
        self.ranks = self.down.ranks
        self._activation = activation

    def forward(self, hidden: Tensor, norm: AnyNorm | None, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one."""
        result: Tensor
        gate_up, gate = self.gate_up, self._activation
        if self.down.takes_pieces() and (pieces := gate_up.pieces(hidden, norm)) is not None:
            return self.down.of_pieces(pieces, gate, residual)
        if gate_up.gates(hidden.shape[0]):
            result = self.down(gate_up(hidden, norm, gate), None, residual)
        else:
            result = self.down(gate_up(hidden, norm), gate, residual)
        return result


PlainActivation = Literal["gelu", "gelu_tanh", "relu", "relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """An MLP without a gate.

    Attributes:
        activation: Between its projections; ``relu2`` is the square of ReLU, ``xielu`` :class:`XIELU`.
        up: The checkpoint's name of the first projection.
        down: The checkpoint's name of the second one.
    """

    activation: PlainActivation
    up: str = "up_proj"
    down: str = "down_proj"


class PlainMLP(Layer):
    """``down(activation(up(x)))``.

    Args:
        hidden_size: Width in and out.
        intermediate_size: Width between.
        config: The activation and the names.
        bias: Whether the projections have biases.
        context: Where and how it is built.

    Attributes:
        ranks: Sums what ranks have of the output; None: there is one.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, config: PlainConfig, *, bias: bool, context: LayerContext
    ) -> None:
        super().__init__()
        inner = context.parallel.shard("intermediate_size", intermediate_size)
        self.up = ColumnLinear(hidden_size, {config.up: inner}, bias, context)
        self.down = RowLinear(inner, config.down, hidden_size, bias, context)
        self.ranks = self.down.ranks
        named = config.activation
        self._activation = XIELU(context.inside("act_fn")) if named == "xielu" else _ACTIVATIONS[named]

    def forward(self, hidden: Tensor, norm: AnyNorm | None, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one."""
        result: Tensor = self.down(self._activation(self.up(hidden, norm)), None, residual)
        return result


class XIELU(Layer):
    """The activation of Apertus, with two learned strengths. Source: Huang and Schlag, "Deriving Activation Functions Using
    Integration", 2024.

    Args:
        context: Where and how it is built.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self._stored = torch.empty(2, dtype=torch.float32, device=context.device)
        self._constants = torch.empty(2, dtype=torch.float32, device=context.device)
        self._prefix = context.prefix

    def slots(self) -> WeightSlots:
        strengths = {f"{self._prefix}.alpha_{name}": self._stored[i : i + 1] for i, name in enumerate("pn")}
        constants = {f"{self._prefix}.{name}": self._constants[i] for i, name in enumerate(("beta", "eps"))}
        return {name: WeightSlot(each) for name, each in {**strengths, **constants}.items()}

    def forward(self, x: Tensor) -> Tensor:
        """[T, N] -> [T, N]."""
        beta, eps = self._constants
        up, down = F.softplus(self._stored)
        wide = x.float()
        below = (torch.expm1(torch.minimum(wide, eps)) - wide) * (beta + down)
        curve: Tensor = torch.where(wide > 0, up * wide * wide, below) + beta * wide
        return curve.to(x.dtype)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}
