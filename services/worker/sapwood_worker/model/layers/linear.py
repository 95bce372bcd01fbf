"""Linear layers, and the sum of their outputs over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.overlap import CutKind
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.lora_layer import LoraLayer
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm
from sapwood_worker.model.quantization.linear_method import LinearMethod, LinearShape, Part, Renewal
from sapwood_worker.model.weight_slot import Span, WeightSlot, WeightSlots, whole

# The end of a layer that is split over ranks: the sum of the ranks' parts, and the operations fused with the sum.


class RankSum:
    """Sums the ranks' parts of a layer's output.

    Args:
        group: The ranks.
        kind: Which table gives the number of chunks for many rows.

    Attributes:
        kind: The argument; who builds a layer may change it.
    """

    def __init__(self, group: Group, kind: CutKind = "products") -> None:
        self._group = group
        self.kind: CutKind = kind
        self._following: RMSNorm | None = None

    @property
    def following(self) -> RMSNorm | None:
        """The norm that is the only next reader of the residual; None: it is unknown, or of another kind."""
        return self._following

    def norm_follows(self, norm: AnyNorm) -> None:
        """Sets the norm that reads next the residual to which outputs are added. Code that needs the residual earlier calls
        ``Overlap.settle``."""
        self._following = norm if isinstance(norm, RMSNorm) else None

    def of(self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None) -> Tensor:
        """Sums as :meth:`__call__` does, with ``product(x)`` as this rank's part: a new tensor, each row of it from one row of x.
        Many rows may be computed in chunks."""
        if (count := self._count(x)) > 1:
            return self.of_pieces(product, x.tensor_split(count), residual)
        return self(product(x), residual)

    def pieces(self, x: Tensor, norm: AnyNorm | None) -> Iterable[Tensor] | None:
        """Yields the rows of x [T, N] in the chunks in which they are computed, normed by ``norm`` if it is given. If sums of x
        are under way, a chunk waits for its sum. None: compute all at once; nothing is normed yet."""
        if (count := self._count(x)) == 1:
            return None
        if isinstance(norm, RMSNorm) and (coming := norm.pieces(x)) is not None:
            return coming
        return (x if norm is None else norm(x)).tensor_split(count)

    def _count(self, x: Tensor) -> int:
        overlap = self._group.overlap
        return 1 if overlap is None else overlap.pieces(len(x), self.kind)

    def of_pieces(
        self, product: Callable[[Tensor], Tensor], pieces: Iterable[Tensor], residual: Tensor | None
    ) -> Tensor:
        """Sums as :meth:`of` does, with the rows of x in these pieces, one after another."""
        overlap, following = self._group.overlap, self._following
        assert overlap is not None, "nothing is cut"
        if residual is None or following is None:
            return overlap.run(product, pieces, residual)
        overlap.run(product, pieces, residual, left=True)
        following.expect(overlap)
        return residual

    def __call__(self, part: Tensor, residual: Tensor | None) -> Tensor:
        """This rank's part [T, N] -> the sum, added to ``residual`` in place if there is one; may overwrite ``part``."""
        if residual is None:
            return self._group.all_reduce(part)
        following = self._following
        if following is None:
            residual += self._group.all_reduce(part)
        elif (normed := self._group.add_sum(part, residual, following)) is not None:
            following.keep(residual, normed)
        return residual


class Linear(Layer):
    """``x @ weight.T + bias`` with the operations before and after it, in the same kernel if the weights' method fuses them.

    Args:
        shape: The layer's.
        context: Where and how it is built.

    Attributes:
        shape: The argument.
        method: How the weights are stored, and the product with them.
        lora: Adds adapters' products; None: it takes no adapters.
    """

    def __init__(self, shape: LinearShape, context: LayerContext) -> None:
        super().__init__()
        self.shape = shape
        self.method = context.linear.method(shape)
        self.lora: LoraLayer | None = None
        self._ops = context.ops
        self._methods = context.linear

    def slots(self) -> WeightSlots:
        return self.method.slots()

    def finish(self) -> None:
        self.method.finish()

    def forget_copies(self) -> None:
        self.method.forget_copies()

    @property
    def renewal(self) -> Renewal:
        return self.method.renewal

    @property
    def weight_name(self) -> str:
        return f"{self.shape.parts[0].name}.weight"

    def rebuilt(self) -> LinearMethod:
        return self._methods.method(self.shape)

    def put_method(self, method: LinearMethod) -> LinearMethod:
        before, self.method = self.method, method
        return before

    def gates(self, rows: int) -> bool:
        """Whether a gated activation after a product of this many rows costs nothing."""
        return self.method.fuses(rows).gate_after or self._adapted is not None

    @property
    def _adapted(self) -> LoraLayer | None:
        """Adds adapters' products, if rows of the current batch need that. Norms before and gates after the product are then
        separate, as adapters multiply the same input and add to the product itself."""
        lora = self.lora
        return lora if lora is not None and lora.active else None


class ColumnLinear(Linear):
    """A linear layer whose outputs are split over the ranks.

    Args:
        in_features: Width of the input.
        parts: Checkpoint name of each projection (``q_proj``) -> its outputs on this rank, in output order.
        bias: Whether each projection has a bias.
        context: Where and how it is built.
    """

    def __init__(self, in_features: int, parts: Mapping[str, Span], bias: bool, context: LayerContext) -> None:
        named = tuple(Part(context.inside(name).prefix, rows) for name, rows in parts.items())
        super().__init__(LinearShape(named, whole(in_features), bias), context)

    def forward(self, x: Tensor, norm: AnyNorm | None, gate: Gate | None = None) -> Tensor:
        """[T, in_features], normed first by ``norm`` -> [T, sum of the parts], half of that with a gated activation ``gate``."""
        if (pieces := self.pieces(x, norm, gate)) is not None:
            return torch.cat(list(pieces))
        method = self.method
        if (lora := self._adapted) is not None:
            x = x if norm is None else norm(x)
            low = lora.shrink(x)
            out = method.apply(x)
            return lora.add(low, out) if gate is None else lora.add_gated(low, out, gate)
        fused = method.fuses(x.shape[0])
        taken = norm if fused.norm and isinstance(norm, RMSNorm) and not norm.has(x) else None
        if taken is None and norm is not None:
            x = norm(x)
        if gate is None or fused.gate_after:
            return method.apply(x, norm=taken, gate_after=gate)
        return self._ops.gated(gate)(method.apply(x, norm=taken))

    def pieces(self, x: Tensor, norm: AnyNorm | None, gate: Gate | None = None) -> Iterator[Tensor] | None:
        """Computes :meth:`forward` chunk by chunk while sums of x are under way (:meth:`RMSNorm.pieces`), each chunk when the
        caller takes it; None: no sum is under way."""
        rows = norm.pieces(x) if isinstance(norm, RMSNorm) else None
        return None if rows is None else (self(each, None, gate) for each in rows)


class RowLinear(Linear):
    """A linear layer whose inputs are split over the ranks; the sum of the ranks' outputs is the output.

    Args:
        columns: The inputs on this rank.
        name: The checkpoint's name of the projection: ``o_proj``.
        out_features: Width of the output.
        bias: Whether it has a bias; none where outputs are not summed here.
        context: Where and how it is built.
        summed: Whether the ranks' outputs are summed here; else the caller sums them.

    Attributes:
        ranks: Sums the ranks' outputs; None: there is one rank, or the caller sums.
    """

    def __init__(
        self, columns: Span, name: str, out_features: int, bias: bool, context: LayerContext, *, summed: bool = True
    ) -> None:
        part = Part(context.inside(name).prefix, whole(out_features))
        super().__init__(LinearShape((part,), columns, bias and context.split_over is None), context)
        group = context.split_over if summed else None
        self.ranks = None if group is None else RankSum(group)
        # The bias of a split layer: added once, after the sum.
        self._late_bias: WeightSlots = {}
        self._adds_bias = group is not None and (not group.partial or group.rank == 0)
        if bias and group is not None:
            empty = torch.empty(out_features, dtype=context.dtype, device=context.device)
            self._late_bias[f"{part.name}.bias"] = WeightSlot(empty)

    def slots(self) -> WeightSlots:
        return super().slots() | self._late_bias

    def forward(self, x: Tensor, gate: Gate | None = None, residual: Tensor | None = None) -> Tensor:
        """[T, inputs of this rank], or twice as wide before a gated activation ``gate`` -> [T, out_features].

        The output is added to ``residual`` in place, if there is one, and the sum returned.
        """
        method, ranks = self.method, self.ranks
        if ranks is None:
            fused = method.fuses(x.shape[0])
            if (lora := self._adapted) is not None:
                x = x if gate is None else self._ops.gated(gate)(x)
                low = lora.shrink(x)
                result = lora.add(low, method.apply(x, residual=residual if fused.residual else None))
                return result if residual is None or fused.residual else residual.add_(result)
            if gate is not None and not fused.gate_before:
                x, gate = self._ops.gated(gate)(x), None
            if residual is None or fused.residual:
                return method.apply(x, gate_before=gate, residual=residual)
            residual += method.apply(x, gate_before=gate)
            return residual
        product = partial(self._part, gate=gate)
        if not self._late_bias:
            return ranks.of(product, x, residual)
        result = ranks.of(product, x, None)
        if self._adds_bias:
            for bias in self._late_bias.values():
                result += bias.target
        if residual is None:
            return result
        residual += result
        return residual

    def takes_pieces(self) -> bool:
        """Whether :meth:`of_pieces` may be called."""
        return self.ranks is not None and not self._late_bias

    def of_pieces(self, pieces: Iterator[Tensor], gate: Gate | None, residual: Tensor | None) -> Tensor:
        """Computes :meth:`forward` of the chunks of x. Takes each chunk when the sum of the one before has begun."""
        assert self.ranks is not None
        return self.ranks.of_pieces(partial(self._part, gate=gate), pieces, residual)

    def _part(self, x: Tensor, gate: Gate | None) -> Tensor:
        """This rank's part of the output."""
        if (lora := self._adapted) is not None:
            x = x if gate is None else self._ops.gated(gate)(x)
            low = lora.shrink(x)
            return lora.add(low, self.method.apply(x))
        if gate is not None and not self.method.fuses(x.shape[0]).gate_before:
            x, gate = self._ops.gated(gate)(x), None
        return self.method.apply(x, gate_before=gate)
