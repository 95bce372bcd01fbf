"""What the kernels of states are called with, and what computes steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from sapwood_kernels.state.spans import Spans

GateOrder = Literal["norm first", "gate first"]
"""How a norm and a gate follow each other."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The states that a step reads and writes.

    Attributes:
        states: float32 [slots, numbers]: a layer's, written in place. The numbers of a slot are contiguous: first the windows of
            the convolution [channels, taps - 1], if the layer has one, then the state of its heads.
        rows: int64 [T]: the slot of each row, each at most once; -1: the row is padding, changes no state, and gets zeros.
            With spans, int32 [S]: the slot of each.
        spans: The rows of each request, all together all rows; None: each row is a request's.
    """

    states: Tensor
    rows: Tensor
    spans: Spans | None = None


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a gated delta net.

    Attributes:
        heads: Key heads.
        shared: Value heads of a key head.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        taps: Inputs that an output of the convolution depends on.
        joined: Whether the projections lie head by head (q, k, v, gate; strengths, decays), or one after the other.
        eps: Added to the mean square in the norm behind.
    """

    heads: int
    shared: int
    key_dim: int
    value_dim: int
    taps: int
    joined: bool
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a gated delta net, float32.

    Attributes:
        convolution: [channels, taps]: of all queries, all keys, all values.
        decay: [value heads]: the logarithm of each head's rate.
        bias: [value heads]: of the steps.
        norm: [value_dim].
    """

    convolution: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class SpaceShape:
    """The sizes of a state space whose heads decay by one factor a token.

    Attributes:
        heads: H.
        groups: G, which divides H; heads of a group share ``b`` and ``c``.
        head_dim: P: inputs of a head.
        state_size: N: numbers that each input of a head has in the state.
    """

    heads: int
    groups: int
    head_dim: int
    state_size: int


class StateSteps(Protocol):
    """Advances states in place: by one token a row, or by the rows of spans.

    Inputs whose dtype is said to be float32 have that of their projections with spans, and so have results.
    """

    def delta(self, inputs: Tensor, factors: Tensor, slots: Slots, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
        """A gated delta net with its convolution and its gated norm: [T, value heads * value_dim] of the inputs' dtype.

        Args:
            inputs: [T, q + k + v + gates]: queries, keys, values and gates.
            factors: [T, 2 * value heads]: strengths and decays before their activations.
            slots: The states; those of heads are [value heads, key_dim, value_dim].
            weights: The layer's.
            shape: Its sizes.
        """
        ...

    def convolve(self, x: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A short convolution and ``silu``: [T, channels], rows contiguous -> float32 [T, channels].

        Args:
            x: The inputs.
            slots: The states; their first numbers are the windows.
            weight: float32 [channels, taps]; the last tap is that of the input itself.
            bias: float32 [channels]; None: there is none.
        """
        ...

    def convolve_gated(self, inputs: Tensor, slots: Slots, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``c * convolution(b * x)`` of inputs [T, b + c + x], rows contiguous: [T, channels] of their dtype. The other arguments
        are those of :meth:`convolve`."""
        ...

    def space(
        self,
        inputs: Tensor,
        step: Tensor,
        slots: Slots,
        offset: int,
        decay: Tensor,
        bias: Tensor,
        skip: Tensor,
        limits: tuple[float, float],
        shape: SpaceShape,
    ) -> Tensor:
        """The state space of Mamba 2: float32 [T, H * P].

        Args:
            inputs: float32 [T, H * P + 2 * G * N]: x, b and c.
            step: [T, H]: before the bias and softplus; rows contiguous.
            slots: The states; those of heads are [H, P, N].
            offset: Numbers of a slot before the states of its heads.
            decay: float32 [H]: the logarithm of each head's rate.
            bias: float32 [H].
            skip: float32 [H]: factors of x in the output.
            limits: The least and the largest step.
            shape: The sizes.
        """
        ...

    def linear(self, qkv: Tensor, slots: Slots, rates: Tensor, shape: SpaceShape) -> Tensor:
        """Linear attention that decays, after ``silu`` of its inputs: float32 [T, H * D].

        Args:
            qkv: [T, H * 3 * D]: query, key and value of each head, rows contiguous.
            slots: The states [H, values' D, keys' D].
            rates: float32 [H]: the logarithm of each head's factor of a token.
            shape: The sizes; D is both of a head.
        """
        ...

    def selective(
        self,
        x: Tensor,
        step: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
        slots: Slots,
        offset: int,
        decay: Tensor,
        skip: Tensor,
    ) -> Tensor:
        """The state space of Mamba 1, gated: [T, C] of the gate's dtype.

        Args:
            x: float32 [T, C].
            step: [T, C]: before softplus.
            b, c: [T, N].
            gate: [T, C], rows contiguous.
            slots: The states; those of channels are [C, N].
            offset: Numbers of a slot before the states of its channels.
            decay: float32 [C, N]: the logarithms of the rates.
            skip: float32 [C]: factors of x in the output.
        """
        ...
