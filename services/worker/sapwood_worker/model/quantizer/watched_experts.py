"""The experts of a layer, and the second moments of what goes into each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sapwood_kernels.experts.stack import ExpertStack
from sapwood_worker.model.layers.sparse.experts import Experts


@dataclass(frozen=True, slots=True)
class _WatchedStack:
    """A stack that counts what its products are asked for: by expert the sum of ``x.T @ x``, float32 [K, K]."""

    stack: ExpertStack
    moments: dict[int, Tensor] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        return self.stack.experts

    @property
    def outputs(self) -> int:
        return self.stack.outputs

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.stack.tensors

    def product(self, expert: int, x: Tensor) -> Tensor:
        wide = x.float()
        if expert not in self.moments:
            self.moments[expert] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        self.moments[expert].addmm_(wide.t(), wide)
        return self.stack.product(expert, x)


class WatchedExperts:
    """Experts that are watched from now on.

    Args:
        experts: Those of a layer.
    """

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._stacks: list[_WatchedStack] = []
        experts.ready(self._watched)

    def stop(self) -> dict[str, Tensor]:
        """Ends it; returns the moments by projection, of experts that tokens went to."""
        self._experts.ready()
        gate_up, down = (stack.moments for stack in self._stacks)
        *before, after = self._experts.projections
        return {
            self._experts.name(expert, part): moments
            for found, parts in ((gate_up, before), (down, [after]))
            for expert, moments in found.items()
            for part in parts
        }

    def _watched(self, stack: ExpertStack) -> ExpertStack:
        self._stacks.append(_WatchedStack(stack))
        return self._stacks[-1]
