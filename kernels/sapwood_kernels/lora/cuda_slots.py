"""A GPU's slots: memory at fixed addresses, filled layer by layer on a queue of its own while a step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.lora.layout import Gate, IntArray, RowGroups
from sapwood_kernels.lora.slots import GraphRows, LoraSlots
from sapwood_kernels.lora.triton_lora import FEW, MANY, Rows, TritonLora

_FEW_ROWS = 256
"""Rows of a batch up to which groups are small."""


def _on_device(groups: RowGroups, ranks: IntArray, count: int) -> IntArray:
    """What :class:`~sapwood_kernels.lora.triton_lora.Rows` holds, with places for so many groups, in one piece."""
    found = np.zeros((5, count), np.int64)
    held = np.where(groups.slots < 0, 0, ranks[groups.slots])
    firsts = groups.order[groups.starts]
    for line, each in zip(found, (groups.slots, groups.starts, groups.counts, held, firsts), strict=True):
        line[: len(each)] = each
    return np.concatenate((groups.order, found.ravel()))


class CudaGraphRows(GraphRows):
    """The rows of a captured batch, in buffers at fixed addresses.

    Args:
        count: Rows of the batch.
        ranks: int64 [slots]: the rank of the adapter in each slot; may change between replays.
        fill: Copies an array into a tensor on the device, in its queue.
        device: The device.

    Attributes:
        rows: What kernels read.
    """

    def __init__(
        self, count: int, ranks: IntArray, fill: Callable[[Tensor, IntArray], None], device: torch.device
    ) -> None:
        super().__init__(count)
        self._ranks, self._fill = ranks, fill
        self._buffer = torch.zeros(6 * count, dtype=torch.int64, device=device)
        self.rows = Rows(self._buffer[:count], self._buffer[count:].view(5, count), FEW)
        self.set(self.slots)

    def set(self, slots: IntArray) -> None:
        super().set(slots)
        self._fill(self._buffer, _on_device(RowGroups.of(self.slots, FEW), self._ranks, self.count))


class CudaLoraSlots(LoraSlots):
    """Args: as :class:`LoraSlots`, and:
    most: The largest rank that slots have room for.
    fill: Copies an array into a tensor on the device, in its queue.

    Attributes:
        beside: Whether captured shrinks run beside the layers' own products.
    """

    beside = True

    def __init__(
        self,
        slots: int,
        dtype: torch.dtype,
        gated: Callable[[Gate], Callable[[Tensor], Tensor]],
        device: torch.device,
        most: int,
        fill: Callable[[Tensor, IntArray], None],
    ) -> None:
        super().__init__(slots, dtype, gated, device)
        self._most, self._fill = most, fill
        self._queued = device.type == "cuda"
        aside = torch.cuda.Stream(device) if self._queued and self.beside else None  # type: ignore[no-untyped-call]
        self._triton = self.products = TritonLora(most, aside)
        self._layers: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if self._queued else None  # type: ignore[no-untyped-call]
        # The ends of the latest copies by layer, and what the copies read.
        self._coming: dict[int, torch.cuda.Event] = {}
        self._reading: list[tuple[torch.cuda.Event, Sequence[Tensor]]] = []

    def add_layer(self, cells: int) -> Tensor:
        self._layers.append(torch.zeros(self._count, cells * self._most, dtype=self._dtype, device=self._device))
        return self._layers[-1]

    def host(self, numbers: int) -> Tensor:
        return torch.zeros(numbers, dtype=self._dtype, pin_memory=self._queued)

    def load(self, adapters: Sequence[tuple[int, int, Sequence[Tensor]]]) -> None:
        for slot, rank, _ in adapters:
            self._ranks[slot] = rank
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for layer, memory in enumerate(self._layers):
                for slot, _, layers in adapters:
                    memory[slot, : len(layers[layer])].copy_(layers[layer], non_blocking=True)
                if self._stream is not None:
                    self._coming[layer] = self._stream.record_event()
        if self._stream is not None:
            self._reading = [each for each in self._reading if not each[0].query()]  # type: ignore[no-untyped-call]
            self._reading += [(self._stream.record_event(), layers) for _, _, layers in adapters]

    def begin(self, slots: IntArray) -> None:
        most = FEW if len(slots) <= _FEW_ROWS else MANY
        groups = RowGroups.of(slots, most)
        count = len(groups.slots)
        moved = torch.empty(len(slots) + 5 * count, dtype=torch.int64, device=self._device)
        self._fill(moved, _on_device(groups, self._ranks, count))
        self._triton.begin(Rows(moved[: len(slots)], moved[len(slots) :].view(5, count), most))

    def graph_rows(self, count: int) -> CudaGraphRows:
        return CudaGraphRows(count, self._ranks, self._fill, self._device)

    def begin_captured(self, rows: GraphRows) -> None:
        assert isinstance(rows, CudaGraphRows)
        self._triton.begin(rows.rows, captured=True)

    def await_layer(self, layer: int) -> None:
        if self._coming and (event := self._coming.pop(layer, None)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def await_all(self) -> None:
        if self._coming:
            torch.cuda.current_stream(self._device).wait_event(self._coming[max(self._coming)])
            self._coming.clear()
