"""The matrices that all experts have alike: one for each expert, held together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.quantised.grouped import BLOCK, E2M1, GroupedWeight, Rounding, dequantise, same_numbers


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
    """Matrices in few bits, all held alike for a kernel that widens them as it multiplies: a ``GroupedWeight`` of each expert.

    Attributes:
        codes: float8_e4m3fn or int8 [E, N, K]; or 4-bit floats (E2M1), uint8 [E, N, K / 2] with the first of two in the low half;
            or integers of 4 bits, or places in a table, held alike; or integers of 8, uint8 [E, N, K].
        scales: [E, N / tall, G], one for each ``group`` numbers of ``tall`` rows: of any floating type, or uint8 exponents of 2
            with a bias of 127.
        group: Numbers that share a scale; the last group of a row may have fewer.
        bias: [E, N], or None.
        zeros: uint8 [E, N, G], what each integer has less; None: nothing.
        integers: Bits of the codes where they are integers.
        mins: [E, N, G], of any floating type: what each number has less once it is scaled; None: nothing.
        table: float32 [16]: the values of 4-bit codes, of all experts; None: they are integers, or E2M1.
        factors: float32 [E, N, 1], of rows; None: 1.
        rounds: By what scales inputs may be rounded to the codes' 8 bits; None: they may not.
        tall: Rows that share their scales, where there are neither zeros nor minima.
        orders: int32 [E, K]: which input an expert's number j of a row is multiplied with; None: the j-th.
    """

    codes: Tensor
    scales: Tensor
    group: int
    bias: Tensor | None = None
    zeros: Tensor | None = None
    integers: Literal[4, 8] | None = None
    mins: Tensor | None = None
    table: Tensor | None = None
    factors: Tensor | None = None
    orders: Tensor | None = None
    rounds: Rounding | None = None
    tall: int = 1

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def tensors(self) -> Sequence[Tensor]:
        held = self.codes, self.scales, self.bias, self.zeros, self.mins, self.factors, self.orders
        return [each for each in held if each is not None]

    @property
    def bits(self) -> Literal[4, 8]:
        """Bits of a number."""
        return self.integers or (4 if self.codes.dtype == torch.uint8 else 8)

    @property
    def columns(self) -> int:
        """K."""
        return self.codes.shape[2] * 8 // self.bits

    def weight(self, expert: int) -> GroupedWeight:
        """An expert's; a view of the codes."""
        scales, table = self.scales[expert], self.table
        if self.tall > 1:
            scales = scales.repeat_interleave(self.tall, 0)
        if scales.dtype == torch.uint8:
            scales = (scales.short() << 7).view(torch.bfloat16)  # the exponent alone
        if table is None and self.bits == 4 and not self.integers:
            table = torch.tensor(E2M1, device=self.codes.device)
        held = (None if each is None else each[expert] for each in (self.zeros, self.mins, self.factors, self.orders))
        zeros, mins, factors, order = held
        return GroupedWeight(
            self.codes[expert], scales, self.group, self.columns, self.bits, zeros, table, factors, mins,
            None if order is None else order.long(),
        )  # fmt: skip

    def product(self, expert: int, x: Tensor) -> Tensor:
        weight = dequantise(self.weight(expert)).to(x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias[expert])


def stacked(weights: Iterable[GroupedWeight], slots: int, bias: Tensor | None = None) -> StoredStack:
    """Weights of one layout in one stack; each may be freed once it is there. Those in blocks have a row of scales for each.

    Args:
        weights: Each expert's, at least one's.
        slots: Experts that there is room for; the first ones are filled.
        bias: As :class:`StoredStack` has it.

    Raises:
        ValueError: They are laid out in different ways, or in one that is no stack's; says which expert.
    """
    first: GroupedWeight | None = None
    layout: dict[str, tuple[torch.Size, torch.dtype | None]] = {}
    made: dict[str, Tensor] = {}
    for index, weight in enumerate(weights):
        even = weight.scales.shape[1] == 1 or (weight.group >= 16 and weight.group & (weight.group - 1) == 0)
        if not even or weight.columns * weight.bits % 8:
            raise ValueError(f"groups of {weight.group} among {weight.columns} inputs")
        first = weight if first is None else first
        held = {name: each for name in _HELD if (each := getattr(weight, name)) is not None}
        tall = BLOCK if weight.rounds == "block" else 1
        held["scales"] = weight.scales[::tall]
        if not made:
            made = {name: each.new_empty(slots, *each.shape) for name, each in held.items()}
            if "order" in made:
                made["order"] = made["order"].int()
        kinds = {name: (each.shape, None if name == "order" else each.dtype) for name, each in held.items()}
        layout = layout or kinds
        if (
            kinds != layout
            or (weight.group, weight.bits, weight.rounds) != (first.group, first.bits, first.rounds)
            or not same_numbers(weight.table, first.table)
        ):
            raise ValueError(f"its layout is not that of the first expert, {index} before it")
        for name, each in held.items():
            made[name][index] = each
    assert first is not None
    table, integers = first.table, None if first.codes.is_floating_point() or first.table is not None else first.bits
    if table is not None and table.tolist() == list(E2M1):
        table = None
    return StoredStack(
        made["codes"], made["scales"], first.group, bias, made.get("zeros"), integers, made.get("mins"), table,
        made.get("factors"), made.get("order"), first.rounds, tall,
    )  # fmt: skip


_HELD = ("codes", "scales", "zeros", "mins", "factors", "order")


def in_few_bits(*stacks: ExpertStack) -> bool:
    """Whether any of these matrices are widened as they are multiplied."""
    return any(isinstance(each, StoredStack) for each in stacks)
