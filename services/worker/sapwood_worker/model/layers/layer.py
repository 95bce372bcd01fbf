"""The base of all layers and models."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A torch module whose call is its ``forward`` and nothing else.

    torch's own call looks for hooks first. A decode step calls some 240 modules for a few microseconds of work each, and on a
    CPU that look-up was a quarter of the time outside the matrix products. Hooks on a Layer are not called.
    """

    def __call__(self, *args: Any) -> Any:
        """``forward(*args)``."""
        return self.forward(*args)
