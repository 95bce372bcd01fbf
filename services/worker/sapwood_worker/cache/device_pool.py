"""The memory behind the pages: one key and one value tensor a layer, written in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DevicePool:
    """Keys and values of every cached token.

    Memory is claimed as it is touched (the tensors are not cleared), so a large pool costs nothing until it is used. What lies
    in a slot that was never written is undefined and must not be read.

    Args:
        num_layers: Layers that cache.
        num_pages: Pages in each.
        page_size: Tokens a page.
        num_kv_heads: Heads a token.
        head_dim: Elements a head.
        dtype: Of keys and values.
        device: Where the pool lies.

    Attributes:
        num_pages: Pages in each layer.
        page_size: Tokens a page.
        device: Where the pool lies.
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
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        self.key_slots = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.value_slots = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._arrivals: Sequence[torch.cuda.Event] = ()

    def arriving(self, events: Sequence[torch.cuda.Event]) -> None:
        """Pages are being filled on another stream; each layer is in place after its event. Replaces what was said before."""
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

    def key_pages(self, layer: int) -> Tensor:
        """A layer's keys as [num_pages, page_size, num_kv_heads, head_dim]; a view."""
        return self.key_slots[layer].view(self.num_pages, self.page_size, *self.key_slots[layer].shape[1:])

    def value_pages(self, layer: int) -> Tensor:
        """A layer's values as [num_pages, page_size, num_kv_heads, head_dim]; a view."""
        return self.value_slots[layer].view(self.num_pages, self.page_size, *self.value_slots[layer].shape[1:])


def page_bytes(*, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values together."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
