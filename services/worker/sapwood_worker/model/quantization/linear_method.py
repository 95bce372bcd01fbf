"""The interface of a linear layer's weights, for every format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.contracts import Gate, Norm
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.quantised.grouped import GroupedWeight
from sapwood_worker.model.weight_slot import Span, StoredTensor, WeightSlot, WeightSlots


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint's projection within a linear layer.

    Attributes:
        name: Its name in a Hugging Face checkpoint: ``model.layers.0.self_attn.q_proj``.
        rows: Which of its outputs are computed here.
    """

    name: str
    rows: Span


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer, or a rank's part of it.

    Attributes:
        parts: Projections of the same input, whose outputs lie side by side.
        columns: Which inputs are multiplied here.
        bias: Whether each part has a bias.
    """

    parts: tuple[Part, ...]
    columns: Span
    bias: bool = False

    @property
    def rows(self) -> int:
        """Outputs computed here: N."""
        return sum(part.rows.size for part in self.parts)

    def slots(self, weight: Tensor, bias: Tensor | None) -> WeightSlots:
        """The slots of the parts' weights in a weight [N, K] and of their biases in a bias [N]."""
        slots: WeightSlots = {}
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.rows.size)
            slots[f"{part.name}.weight"] = WeightSlot(weight[rows], spans=(part.rows, self.columns))
            if bias is not None:
                slots[f"{part.name}.bias"] = WeightSlot(bias[rows], spans=(part.rows,))
            start = rows.stop
        return slots


@dataclass(frozen=True, slots=True)
class Fuses:
    """The operations that a method fuses with the product; the layer computes the others separately.

    Attributes:
        norm: An RMSNorm of the input.
        gate_before: A gated activation of the input.
        gate_after: A gated activation of the output.
        residual: The sum with a residual.
    """

    norm: bool = False
    gate_before: bool = False
    gate_after: bool = False
    residual: bool = False


Renewal = Literal["copy", "rebuild", "refuse"]
"""How weights change while a model serves. ``copy``: new ones are copied into the slots, at unchanged addresses, and ``finish``
is called again. ``rebuild``: a new method is filled and takes the place of the old one, because slots do not outlive ``finish``.
``refuse``: they cannot."""


class LinearMethod(ABC):
    """The weights of one linear layer, [N, K], and the product with them.

    Attributes:
        renewal: How the weights change while the model serves.
    """

    renewal: Renewal = "rebuild"

    @abstractmethod
    def slots(self) -> WeightSlots:
        """The tensors that a checkpoint fills."""

    @abstractmethod
    def finish(self) -> None:
        """Readies the weights for use; called once when the slots are filled."""

    def forget_copies(self) -> None:  # noqa: B027 - most have none
        """Lets go of copies of the weights that :meth:`finish` has made; only where :attr:`renewal` is ``copy``."""

    def grouped(self) -> GroupedWeight | None:
        """The contents of its slots, for a grouped product of many layers: called instead of :meth:`finish`.

        None: it is not one weight of 4 or 8 bits, or has a bias.
        """
        return None

    @abstractmethod
    def fuses(self, rows: int) -> Fuses:
        """Which operations it fuses with a product of this many rows."""

    @abstractmethod
    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``gate_after(norm_or_gate_before(x) @ weight.T + bias) + residual``; only what it fuses is given.

        Args:
            x: [T, K], or [T, 2 K] with ``gate_before``.
            norm: Before the product.
            gate_before: Before the product.
            gate_after: After it.
            residual: [T, N], changed in place to the sum, which is returned.

        Returns:
            [T, N], or [T, N / 2] with ``gate_after``.
        """


class TableMethod(LinearMethod):
    """Weights whose rows are also looked up: a token's embedding is a row of the matrix that may also be the output head."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: int64 [T] -> [T, K], in the model's dtype.

        Raises:
            IndexError: There is no such row.
        """


@dataclass(frozen=True, slots=True)
class Stored:
    """The checkpoint's description of its weights.

    Attributes:
        tensors: By their Hugging Face names.
        quantization: ``quantization_config`` of ``config.json``; empty: it has none.
        where: The checkpoint, for error messages.
    """

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def quant_method(self) -> str:
        """The quantisation method's name in ``config.json``; empty: it names none."""
        return str(self.quantization.get("quant_method") or "").lower()

    def unknown(self, setting: str, found: object, known: str) -> ConfigError:
        """The error that ``quantization_config`` says something that cannot be done; ``known`` says what can."""
        return ConfigError(f"{self.where}: quantization_config.{setting} of config.json is {found!r}; {known}")

    def refusal(self, tensor: str, why: str) -> ConfigError:
        """The error that a tensor cannot be read; names it, its type and the scheme."""
        found = self.tensors.get(tensor)
        kind = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
        return ConfigError(f"{self.where}: tensor {tensor} ({kind}, {self.quant_method or 'no quant_method'}): {why}")


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """A format of weights. Each function returns None for a layer that the format cannot hold.

    Attributes:
        quantise: Makes the method that loads weights in the model's dtype and quantises them. None: it cannot be asked for by
            ``--quantization``.
        quantise_head: The same for an output head that is not the embedding, too; its second argument is the rows of every rank's
            part, of which a rank with fewer has zeros. None: heads stay as they are.
        keep: Makes the method that takes weights as the checkpoint stores them. None: no checkpoint stores them so.
        keep_table: The same for a table with a row for each token. None: tables are read in the model's dtype.
        widens: Whether checkpoints can also be read in the model's dtype where they store this format.
        keep_expert: Does what ``keep`` does, for an expert's projections. None: ``keep`` itself, or a format that widens nothing.
        quant_methods: The names in ``config.json`` of the quantisation methods that it keeps.
        check: Raises ConfigError for settings of such a method that are not supported.
    """

    quantise: Callable[[LinearShape, torch.dtype, DeviceOps], LinearMethod | None] | None = None
    quantise_head: Callable[[LinearShape, int, torch.dtype, DeviceOps], LinearMethod] | None = None
    keep: Callable[[LinearShape, torch.dtype, DeviceOps, Stored], LinearMethod | None] | None = None
    keep_table: Callable[[LinearShape, torch.dtype, DeviceOps, Stored], TableMethod | None] | None = None
    widens: bool = False
    keep_expert: Callable[[LinearShape, torch.dtype, DeviceOps, Stored], LinearMethod | None] | None = None
    quant_methods: tuple[str, ...] = ()
    check: Callable[[Stored], None] | None = None
