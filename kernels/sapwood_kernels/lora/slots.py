"""The slots that hold adapters on a device, and the products with what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.lora.layout import NONE, Gate, IntArray, LoraProducts
from sapwood_kernels.lora.reference import TorchLora


class GraphRows:
    """The rows of a captured batch. Here for a device that captures nothing: they are kept on the host.

    Args:
        count: Rows of the batch.

    Attributes:
        count: The argument.
        slots: int64 [count]: each row's slot.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.slots: IntArray = np.full(count, NONE)

    def set(self, slots: IntArray) -> None:
        """Sets the slots of the batch that is replayed next: int64 [T], T at most ``count``; the other rows are padding."""
        self.slots = np.concatenate((slots, np.full(self.count - len(slots), NONE)))


class LoraSlots:
    """In plain torch. A slot is a reference to an adapter's matrices, so that a CPU copies nothing.

    Args:
        slots: How many.
        dtype: The matrices'.
        gated: Makes a gated activation.
        device: Where rows are computed.

    Attributes:
        products: The products with what slots hold.
    """

    products: LoraProducts

    def __init__(
        self, slots: int, dtype: torch.dtype, gated: Callable[[Gate], Callable[[Tensor], Tensor]], device: torch.device
    ) -> None:
        self._count, self._dtype, self._device = slots, dtype, device
        self._ranks = np.zeros(slots, np.int64)
        self._memory: list[list[Tensor]] = []
        self._torch = self.products = TorchLora(self._ranks, gated, device)

    def add_layer(self, cells: int) -> Tensor | Sequence[Tensor]:
        """Makes the slots of one more decoder layer; returns them, as :class:`~sapwood_kernels.lora.layout.LoraPlace` has them.

        Args:
            cells: Numbers of the layer's matrices for each unit of rank.
        """
        self._memory.append([torch.empty(0, dtype=self._dtype, device=self._device)] * self._count)
        return self._memory[-1]

    def host(self, numbers: int) -> Tensor:
        """Zeros on the host for a layer's matrices."""
        return torch.zeros(numbers, dtype=self._dtype)

    def load(self, adapters: Sequence[tuple[int, int, Sequence[Tensor]]]) -> None:
        """Puts adapters into slots, after all work that is queued on the device and before what is queued later.

        Args:
            adapters: For each its slot, its rank, and its matrices of every layer, from :meth:`host`; they must not change later.
        """
        for slot, rank, layers in adapters:
            self._ranks[slot] = rank
            for memory, matrices in zip(self._memory, layers, strict=True):
                memory[slot] = matrices.to(self._device)

    def begin(self, slots: IntArray) -> None:
        """The rows of the batch that is computed next: int64 [T], each row's slot, -1 without an adapter."""
        self._torch.begin(slots)

    def graph_rows(self, count: int) -> GraphRows:
        """The rows of a batch to capture, of so many rows."""
        return GraphRows(count)

    def begin_captured(self, rows: GraphRows) -> None:
        """The rows of the batch that is captured next; :meth:`GraphRows.set` changes their slots for its replays."""
        self._torch.begin(rows.slots)

    def await_layer(self, layer: int) -> None:
        """Has the device's queue wait until a layer's matrices have come."""

    def await_all(self) -> None:
        """The same for all layers."""
