"""A model run layer by layer over pieces of text, with a look at what goes into its linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sapwood_kernels.experts.stack import ExpertStack
from sapwood_kernels.ops.contracts import Gate, Norm
from sapwood_worker.model.layers.linear import Linear
from sapwood_worker.model.layers.sparse.experts import Experts
from sapwood_worker.model.loader import LoadedModel
from sapwood_worker.model.quantization.linear_method import Fuses, LinearMethod
from sapwood_worker.model.runner.kv_calibration import TrialPlan
from sapwood_worker.model.weight_slot import WeightSlots


class Watched(LinearMethod):
    """A method, and the second moments of its inputs.

    Args:
        method: Multiplies.
        columns: Inputs.
        device: Where they lie.

    Attributes:
        method: The argument.
        moments: float32 [columns, columns], the sum over all rows so far.
    """

    def __init__(self, method: LinearMethod, columns: int, device: torch.device) -> None:
        self.method = method
        self.moments = torch.zeros(columns, columns, device=device)

    def slots(self) -> WeightSlots:
        return self.method.slots()

    def finish(self) -> None:
        self.method.finish()

    def fuses(self, rows: int) -> Fuses:
        return Fuses()

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate_before: Gate | None = None,
        gate_after: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        wide = x.float()
        self.moments.addmm_(wide.t(), wide)
        return self.method.apply(x)


class LayerRun:
    """Pieces of text on their way through a model.

    Args:
        loaded: The model.
        pieces: Token ids; each piece is a text by itself.
        dtype: The dtype of activations.
        device: Where the model is.
    """

    def __init__(
        self, loaded: LoadedModel, pieces: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = loaded.model
        self._dtype, self._device = dtype, device
        self._pieces = [torch.tensor(piece, device=device) for piece in pieces]
        self._hidden = [loaded.model.begin(each, torch.arange(len(each), device=device)) for each in self._pieces]
        names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
        self._layout = loaded.family.kv_layout(loaded.config, names[dtype], 16)

    @property
    def has_text(self) -> bool:
        """Whether there are any pieces."""
        return bool(self._pieces)

    def watch(self, index: int) -> tuple[dict[Linear, Tensor], dict[str, Tensor]]:
        """The second moments of what goes into a layer's linear layers, and, by name, into projections of experts that tokens
        went to; the pieces stay where they are."""
        experts = [
            WatchedExperts(each) for each in list(self._model.layers)[index].modules() if isinstance(each, Experts)
        ]
        linears = [each for each in list(self._model.layers)[index].modules() if isinstance(each, Linear)]
        watched: dict[Linear, Watched] = {}
        for linear in linears:
            linear.method = watched[linear] = Watched(linear.method, linear.shape.columns.size, self._device)
        self._through(index)
        for linear in linears:
            linear.method = watched[linear].method
        of_experts = {name: moments for each in experts for name, moments in each.stop().items()}
        return {linear: each.moments for linear, each in watched.items()}, of_experts

    def advance(self, index: int) -> None:
        """Takes the pieces through a layer."""
        self._hidden = self._through(index)

    def perplexity(self) -> float:
        """The perplexity of the pieces, which have passed the last layer."""
        losses = []
        for piece, hidden in zip(self._pieces, self._hidden, strict=True):
            logits = self._model.logits(hidden).float().log_softmax(-1)
            losses.append(-logits[:-1].gather(1, piece[1:, None]))
        return float(torch.cat(losses).mean().exp())

    def _through(self, index: int) -> list[Tensor]:
        return [
            self._model.run_layer(
                index, hidden.clone(), TrialPlan(self._layout, len(hidden), self._dtype, self._device)
            )
            for hidden in self._hidden
        ]


# The experts of a layer, and the second moments of what goes into each.
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
