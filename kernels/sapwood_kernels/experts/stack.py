"""The matrices that all experts have alike: one for each expert, held together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.quantised.grouped import E2M1, GroupedWeight, dequantise


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

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that makes it up, [E, ...] each, which may be written to expert by expert; empty: it may not."""
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

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

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

    @property
    def tensors(self) -> Sequence[Tensor]:
        return ()

    def product(self, expert: int, x: Tensor) -> Tensor:
        result = self.products[expert](x)
        return result if self.bias is None else result + self.bias[expert]


@dataclass(frozen=True, slots=True)
class StoredStack:
    """Matrices in few bits, held in two tensors for a kernel that widens them as it multiplies.

    Attributes:
        codes: float8_e4m3fn [E, N, K]; or 4-bit floats (E2M1), uint8 [E, N, K / 2] with the first of two in the low half; or
            integers of 4 bits, held alike, or of 8, uint8 [E, N, K].
        scales: [E, N, G], one for each ``group`` numbers of a row: of any floating type, or of 4-bit floats uint8 exponents of 2
            with a bias of 127.
        group: Numbers that share a scale; the last group of a row may have fewer.
        bias: [E, N], or None.
        zeros: uint8 [E, N, G], what each integer has less; None: codes are floats.
        integers: Bits of the codes where they are integers.
    """

    codes: Tensor
    scales: Tensor
    group: int
    bias: Tensor | None = None
    zeros: Tensor | None = None
    integers: Literal[4, 8] | None = None

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [each for each in (self.codes, self.scales, self.bias, self.zeros) if each is not None]

    @property
    def bits(self) -> Literal[4, 8]:
        """Bits of a number."""
        return self.integers or (4 if self.codes.dtype == torch.uint8 else 8)

    @property
    def columns(self) -> int:
        """K."""
        return self.codes.shape[2] * 8 // self.bits

    def weights(self) -> list[GroupedWeight]:
        """Each expert's; views of the codes."""
        if self.zeros is not None:
            parts = zip(self.codes, self.scales, self.zeros, strict=True)
            return [GroupedWeight(*each[:2], self.group, self.columns, self.bits, zeros=each[2]) for each in parts]
        scales = (
            self.scales if self.bits == 8 else (self.scales.short() << 7).view(torch.bfloat16)
        )  # the exponent alone
        table = torch.tensor(E2M1, device=self.codes.device) if self.bits == 4 else None
        return [
            GroupedWeight(codes, each, self.group, self.columns, self.bits, table=table)
            for codes, each in zip(self.codes, scales, strict=True)
        ]

    def product(self, expert: int, x: Tensor) -> Tensor:
        weight = dequantise(self.weights()[expert]).to(x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias[expert])


def in_few_bits(*stacks: ExpertStack) -> bool:
    """Whether any of these matrices are widened as they are multiplied."""
    return any(isinstance(each, StoredStack) for each in stacks)
