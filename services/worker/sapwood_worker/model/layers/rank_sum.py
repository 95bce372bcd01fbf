"""The end of a layer that is split over ranks: the sum of their parts, and what is done with the sum in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.overlap import CutKind
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm


class RankSum:
    """Sums what ranks have of a layer's output.

    Args:
        group: The ranks.
        kind: By which table many rows are computed in pieces.

    Attributes:
        kind: The argument; who builds a layer may change it.
    """

    def __init__(self, group: Group, kind: CutKind = "products") -> None:
        self._group = group
        self.kind: CutKind = kind
        self._following: RMSNorm | None = None

    @property
    def following(self) -> RMSNorm | None:
        """The norm that alone sees the residual next; None: it is not known, or of another kind."""
        return self._following

    def norm_follows(self, norm: AnyNorm) -> None:
        """Tells which norm comes next to see the residual that outputs are added to. Whoever sees it before has it settled:
        ``Overlap.settle``."""
        self._following = norm if isinstance(norm, RMSNorm) else None

    def of(self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None) -> Tensor:
        """Sums as :meth:`__call__` does, with ``product(x)`` as this rank's part: a new tensor, each row of it from one row of x.
        Many rows may be computed in pieces."""
        if (count := self._count(x)) > 1:
            return self.of_pieces(product, x.tensor_split(count), residual)
        return self(product(x), residual)

    def pieces(self, x: Tensor, norm: AnyNorm | None) -> Iterable[Tensor] | None:
        """The rows of x [T, N], normed by ``norm`` if it is given, in the pieces in which they are to be computed: where sums of
        x are under way, as they come, each when it is asked for. None: all at once, and nothing is normed yet."""
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
