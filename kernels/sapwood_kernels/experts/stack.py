"""The matrices that all experts have alike: one for each expert, held together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class ExpertStack(Protocol):
    """A matrix [N, K] of each of E experts, in whatever format."""

    @property
    def experts(self) -> int:
        """E."""
        ...

    @property
    def outputs(self) -> int:
        """N."""
        ...

    def product(self, expert: int, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` of one expert: [T, K] -> [T, N]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseStack:
    """Matrices in the model's dtype.

    Attributes:
        weight: [E, N, K].
        bias: [E, N], or None.
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    def product(self, expert: int, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


@dataclass(frozen=True, slots=True)
class StackOfProducts:
    """Matrices in a format with a product of its own.

    Attributes:
        products: Each expert's.
        outputs: N.
        bias: [E, N], or None.
    """

    products: Sequence[Callable[[Tensor], Tensor]]
    outputs: int
    bias: Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.products)

    def product(self, expert: int, x: Tensor) -> Tensor:
        result = self.products[expert](x)
        return result if self.bias is None else result + self.bias[expert]
