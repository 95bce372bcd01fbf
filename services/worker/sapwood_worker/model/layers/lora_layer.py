"""What a linear layer adds for the rows of a batch that have an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sapwood_kernels.lora.layout import LoraPlace, LoraProducts
from sapwood_kernels.ops.contracts import Gate


class LoraBatch:
    """The batch that is being computed.

    Attributes:
        rows: How many of its rows have an adapter; 0: layers do nothing.
        applied: Rows times linear layers for which an adapter was computed so far.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.applied = 0


class LoraLayer:
    """A linear layer's matrices in the slots, and the products with them.

    Args:
        place: Where the matrices lie.
        products: The device's.
        batch: The batch that is being computed.
        ready: Is called before the matrices are read: waits, in the device's queue, until those on their way have come.

    Attributes:
        place: The argument.
        touched: Whether an adapter in any slot has matrices here.
    """

    def __init__(
        self, place: LoraPlace, products: LoraProducts, batch: LoraBatch, ready: Callable[[], None] | None = None
    ) -> None:
        self.place = place
        self.touched = False
        self._products, self._batch, self._ready = products, batch, ready

    @property
    def active(self) -> bool:
        """Whether the batch has rows for which something may be added here."""
        return self.touched and self._batch.rows > 0

    def shrink(self, x: Tensor) -> Any:
        """The first product with x [T, K], for :meth:`add`; it may run beside what is launched until then."""
        self._batch.applied += self._batch.rows
        if self._ready is not None:
            self._ready()
        return self._products.shrink(self.place, x)

    def add(self, low: Any, out: Tensor) -> Tensor:
        """Adds to ``out`` [T, N], in place, what each row's adapter makes of x; returns ``out``.

        Args:
            low: From :meth:`shrink` of x.
            out: What is added to.
        """
        return self._products.add(self.place, low, out)

    def add_gated(self, low: Any, out: Tensor, gate: Gate) -> Tensor:
        """The gated activation, [T, N / 2], of :meth:`add`'s sum; may overwrite ``out``."""
        return self._products.add_gated(self.place, low, out, gate)
