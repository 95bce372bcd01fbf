"""The end of a layer that is split over ranks: the sum of their parts, and what is done with the sum in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm


class RankSum:
    """Sums what ranks have of a layer's output.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
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
        overlap = self._group.overlap
        if overlap is not None and (count := overlap.pieces(len(x))) > 1:
            return self.of_pieces(product, x.tensor_split(count), residual)
        return self(product(x), residual)

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
