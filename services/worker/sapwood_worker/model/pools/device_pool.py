"""The memory behind the pages: one tensor of pages for each layer, written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.kv_destination import KVDestination
from sapwood_worker.model.pools.state_pool import StatePool
from sapwood_worker.records.kv_layout import KVLayout

IntArray = npt.NDArray[np.int64]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class KVScales:
    """Factors by which stored numbers are multiplied to give the true ones: ours are powers of two, so that scaling is exact, a
    checkpoint's may be any.

    Attributes:
        keys: One factor for each layer's keys.
        values: One factor for each layer's values.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @staticmethod
    def largest(found: Sequence[KVScales]) -> KVScales:
        """The largest factor that any rank found for each layer; it is good for all of them."""
        keys = zip(*(each.keys for each in found), strict=True)
        values = zip(*(each.values for each in found), strict=True)
        return KVScales(tuple(map(max, keys)), tuple(map(max, values)))

    def of(self, layer: int) -> tuple[float, float]:
        """The factors of a layer's keys and of its values."""
        return self.keys[layer], self.values[layer]


class DevicePool:
    """The keys and values of every cached token.

    The system allocates memory at first use (the tensors are not cleared), so a large pool costs nothing until it is used. What
    lies in a slot that was never written is undefined and must not be read.

    Args:
        layout: What a page holds.
        num_pages: Pages of each layer, one number for all or one for each of the layout's groups. The last page of each is the
            scratch page: no request owns it, padding rows write it, and it is read where a row of the page table names no page.
        device: Where the pool lies.
        scales: The factors of a float8 pool; None: numbers are stored as they are.
        states: The attribute.

    Attributes:
        states: The states of layers that keep one; None: no layer does.
        layout, device: The arguments.
        num_pages: Pages of each layer of the first group.
        counts: Pages of each layer, for each group.
        group: By layer its group.
        page_size: Tokens in a page.
        dtype: The dtype in which keys and values are stored.
        scales: The factors of each layer; 1 where none were given.
        pages: By layer: [num_pages, *layout.page_shape].
        kept: By layer what it keeps.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int | Sequence[int],
        device: torch.device,
        scales: KVScales | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.states = states
        self.layout = layout
        self.counts = (num_pages,) * len(layout.groups) if isinstance(num_pages, int) else tuple(num_pages)
        self.num_pages = self.counts[0]
        self.page_size = layout.page_size
        self.device = device
        ones = (1.0,) * (max(layout.layers, default=-1) + 1)
        self.scales = KVScales(ones, ones) if scales is None else scales
        self.pages: dict[int, Tensor] = {}
        self.kept = {layer: layout.of(layer) for layer in layout.layers}
        self.group = {layer: layout.group_of(kept) for layer, kept in self.kept.items()}
        # Each layer's keys and values, by slot and by vector.
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}
        self._vectors: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, kept in self.kept.items():
            shape = self.counts[self.group[layer]], *layout.page_shape(kept)
            pages = torch.empty(shape, dtype=_DTYPES[kept.dtype], device=device)
            pages[-1].view(torch.uint8).zero_()  # zero times NaN is NaN, where attention reads and hides it
            keys, values = pages[:, 0], pages[:, -1]
            swapped = layout.order == "HND"
            self._slots[layer] = (keys.transpose(1, 2), values.transpose(1, 2)) if swapped else (keys, values)
            vectors = pages.view(-1, kept.dim)
            self._vectors[layer] = vectors, vectors[pages[0, :-1].numel() // kept.dim :]
            self.pages[layer] = pages
        self.dtype = _DTYPES[layout.paged[0].dtype]
        self._arrivals: dict[int, torch.cuda.Event] = {}
        self._coming_to: Callable[[int], object] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages and states."""
        own = 0 if self.states is None else self.states.num_bytes
        return own + sum(pages.nbytes for pages in self.pages.values())

    def layers_in_records(self) -> list[tuple[int, int, int]]:
        """For each layer the address of its pages, the bytes of one, and where these go in the content of a page's record.

        Empty where there are several page tables: there a record is made of several pages.
        """
        offsets = self.layout.offsets()
        layers = self.pages.items() if len(self.counts) == 1 else ()
        return [(pages.data_ptr(), pages[0].nbytes, offsets[layer]) for layer, pages in layers]

    def scratch_slots(self) -> list[int]:
        """The first slot of each group's scratch page."""
        return [(count - 1) * self.page_size for count in self.counts]

    def arriving(self, events: dict[int, torch.cuda.Event]) -> None:
        """Says that pages are being filled on another stream; each layer is in place after its event, the last of them all after
        the last. Replaces earlier events."""
        self._arrivals = events

    def watched(self, coming_to: Callable[[int], object] | None) -> None:
        """Sets a function that is called when a layer is about to be computed, after all earlier layers have been queued; None:
        no function."""
        self._coming_to = coming_to

    def await_layer(self, layer: int) -> None:
        """Makes the current stream wait until a layer's arriving pages are in place; called before the layer is read."""
        if self._coming_to is not None:
            self._coming_to(layer)
        if self._arrivals:
            torch.cuda.current_stream(self.device).wait_event(self._arrivals[layer])

    def await_all(self) -> None:
        """Makes the current stream wait until all arriving pages are in place."""
        if self._arrivals:
            torch.cuda.current_stream(self.device).wait_event(self._arrivals[next(reversed(self._arrivals))])
            self._arrivals = {}

    def destination(self, layer: int, slots: Tensor) -> KVDestination:
        """Where keys and values for ``slots``, int64 [T], go in a layer."""
        return KVDestination(*self._slots[layer], slots, self.scales.of(layer))

    def rows(self, layer: int, slots: IntArray) -> IntArray:
        """The rows for :meth:`gather` of slots in a layer: int64 [B, M] -> [B, K, M]."""
        keys = self._slots[layer][0]
        page, slot, head = (stride // keys.shape[-1] for stride in keys.stride()[:3])
        first = slots // self.page_size * page + slots % self.page_size * slot
        return first[:, None] + np.arange(keys.shape[2])[:, None] * head

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in some slots, int64 [N]: new tensors [N, K, D] of ``dtype``. Plain, not fast."""
        rows = torch.from_numpy(self.rows(layer, slots.cpu().numpy()[None])[0].T.copy())
        keys, values = self.gather(layer, rows.flatten().to(self.device), dtype)
        return keys.view(*rows.shape, -1), values.view(*rows.shape, -1)

    def gather(self, layer: int, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in some rows, int64 [N] on the device: new tensors [N, D] of ``dtype``, or one of both where
        a token leaves but one vector."""
        (keys, values), scales = self._vectors[layer], self.scales.of(layer)
        found = _gather(keys, rows, scales[0], dtype)
        return found, found if self.kept[layer].parts == 1 else _gather(values, rows, scales[1], dtype)

    def key_pages(self, layer: int) -> Tensor:
        """A view of a layer's keys as [num_pages, page_size, K, D], for any order of storage."""
        return self._slots[layer][0]

    def value_pages(self, layer: int) -> Tensor:
        """A layer's values likewise."""
        return self._slots[layer][1]


def _gather(vectors: Tensor, rows: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if vectors.dtype != torch.float8_e4m3fn:
        return vectors.index_select(0, rows)
    found = vectors.view(torch.uint8).index_select(0, rows).view(vectors.dtype)
    return reference.dequantise(found, scale, dtype)
