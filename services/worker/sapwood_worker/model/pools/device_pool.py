"""The memory behind the pages: one key and one value tensor for each layer, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels import reference


@dataclass(frozen=True, slots=True)
class KVScales:
    """Factors by which stored numbers are multiplied to give the true ones; powers of two, so that scaling is exact.

    Attributes:
        keys: One factor for each layer's keys.
        values: One factor for each layer's values.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def of(self, layer: int) -> tuple[float, float]:
        """The factors of a layer's keys and of its values."""
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True, slots=True)
class KVDestination:
    """Where a layer's keys and values of a step go.

    Attributes:
        keys: [P, page size, K, D], perhaps not contiguous: the layer's key pages.
        values: The same for values.
        slots: int64 [T]: each token's slot.
        scales: What keys and values are divided by as they are stored.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    scales: tuple[float, float] = (1.0, 1.0)

    def store(self, key: Tensor, value: Tensor) -> None:
        """Writes the step's keys and values, [T, K, D] each, to their slots."""
        reference.store_kv(key, value, self.keys, self.values, self.slots, self.scales)


class DevicePool:
    """Keys and values of every cached token.

    Memory is claimed as it is touched (the tensors are not cleared), so a large pool costs nothing until it is used. What lies
    in a slot that was never written is undefined and must not be read.

    Args:
        num_layers: Layers that cache.
        num_pages: Pages in each.
        page_size: Tokens in a page.
        num_kv_heads: Key/value heads of a token.
        head_dim: Elements of a head.
        dtype: The dtype in which keys and values are stored.
        device: Where the pool lies.
        scales: The factors of a float8 pool; None: numbers are stored as they are.

    Attributes:
        num_pages: Pages in each layer.
        page_size: Tokens in a page.
        device: Where the pool lies.
        dtype: The dtype in which keys and values are stored.
        scales: The factors of each layer; 1 where none were given.
        key_slots: For each layer [num_pages * page_size, num_kv_heads, head_dim]: page p holds slots
            p * page_size .. (p + 1) * page_size - 1.
        value_slots: The same for values.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KVScales | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.dtype = dtype
        ones = (1.0,) * num_layers
        self.scales = KVScales(ones, ones) if scales is None else scales
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        self.key_slots = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.value_slots = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._arrivals: Sequence[torch.cuda.Event] = ()

    def arriving(self, events: Sequence[torch.cuda.Event]) -> None:
        """Says that pages are being filled on another stream; each layer is in place after its event. Replaces earlier events."""
        self._arrivals = events

    def await_layer(self, layer: int) -> None:
        """Makes the current stream wait until a layer's arriving pages are in place; called before the layer is read."""
        if self._arrivals:
            torch.cuda.current_stream(self.device).wait_event(self._arrivals[layer])

    def await_all(self) -> None:
        """Makes the current stream wait until all arriving pages are in place."""
        if self._arrivals:
            self.await_layer(-1)
            self._arrivals = ()

    def destination(self, layer: int, slots: Tensor) -> KVDestination:
        """Where keys and values for ``slots``, int64 [T], go in a layer."""
        return KVDestination(self.key_pages(layer), self.value_pages(layer), slots, self.scales.of(layer))

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in some slots, int64 [N]: new tensors [N, K, D] of ``dtype``."""
        keys, values = self.key_slots[layer], self.value_slots[layer]
        if self.dtype != torch.float8_e4m3fn:
            return keys.index_select(0, slots), values.index_select(0, slots)
        bytes_read = (each.view(torch.uint8).index_select(0, slots).view(self.dtype) for each in (keys, values))
        key, value = (
            reference.dequantise(each, scale, dtype)
            for each, scale in zip(bytes_read, self.scales.of(layer), strict=True)
        )
        return key, value

    def key_pages(self, layer: int) -> Tensor:
        """A layer's keys as [num_pages, page_size, num_kv_heads, head_dim]; a view."""
        return self.key_slots[layer].view(self.num_pages, self.page_size, *self.key_slots[layer].shape[1:])

    def value_pages(self, layer: int) -> Tensor:
        """A layer's values as [num_pages, page_size, num_kv_heads, head_dim]; a view."""
        return self.value_slots[layer].view(self.num_pages, self.page_size, *self.value_slots[layer].shape[1:])


def page_bytes(*, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values together."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
