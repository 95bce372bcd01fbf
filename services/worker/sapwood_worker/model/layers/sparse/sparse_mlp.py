"""A mixture of experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_kernels.experts.reference import ClampedGate
from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.distributed.overlap import CutKind
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.linear import RankSum
from sapwood_worker.model.layers.mlp import GatedMLP
from sapwood_worker.model.layers.norm import AnyNorm, RMSNorm
from sapwood_worker.model.layers.sparse.experts import Experts, JoinedExperts, Stacked
from sapwood_worker.model.quantization.dense import DenseMethod
from sapwood_worker.model.quantization.linear_method import Renewal
from sapwood_worker.model.weight_slot import WeightSlot, WeightSlots

# The router of a mixture of experts.


class Router(Layer):
    """Chooses each token's experts. It computes in float32, so that experts with close scores do not change places.

    Args:
        hidden_size: Width of the input.
        routing: How experts are chosen.
        bias: Whether its logits have a bias.
        correction: The checkpoints' name of the correction that is added to scores when experts are chosen; empty: there is none.
        correction_dims: Its dimensions there: 1, or 2 where it is a matrix of one row.
        context: Where and how it is built.

    Attributes:
        counts: int64 [E], on the device: how many tokens have gone to each expert.
    """

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        *,
        bias: bool,
        correction: str,
        correction_dims: int,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self._prefix, self._corrected, self._dims = context.prefix, correction, correction_dims

        def empty(*sizes: int) -> Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=context.device)

        self.counts = torch.zeros(routing.experts, dtype=torch.int64, device=context.device)
        self._weight = empty(routing.experts, hidden_size)
        self._bias = empty(routing.experts) if bias else None
        self._correction = empty(routing.experts) if correction else None
        # Rows sent to experts of other ranks are counted there, with the rows from all ranks.
        counted = self.counts if context.parallel.expert_exchange is None else torch.zeros_like(self.counts)
        joined = context.parallel.rows is not None and context.parallel.expert_exchange is None
        ranks = context.parallel.tp.size if joined else 1
        self._context = context
        self._logits: Callable[[Tensor], Tensor]
        self._normed = context.ops.normed_logits(self._weight, self._bias)
        self._route = context.ops.router(routing, self._correction, counted, ranks)

    def slots(self) -> WeightSlots:
        named = {
            f"{self._prefix}.weight": self._weight,
            f"{self._prefix}.bias": self._bias,
        }
        if self._correction is not None:
            named[self._corrected] = self._correction if self._dims == 1 else self._correction[None]
        return {name: WeightSlot(each) for name, each in named.items() if each is not None}

    def finish(self) -> None:
        self._logits = self._context.ops.router_logits(self._weight, self._bias, self._context.dtype)

    def forward(self, hidden: Tensor, norm: AnyNorm | None, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden_size], a step's rows from ``first`` on -> the same, normed by ``norm`` if it is given; each token's experts,
        integers [T, k], and their weights, float32 [T, k]."""
        fused = self._normed
        if fused is not None and len(hidden) <= fused.most and isinstance(norm, RMSNorm) and norm.computes(hidden):
            x, logits = fused.product(hidden, norm.weight, norm.eps)
        else:
            x = hidden if norm is None else norm(hidden)
            logits = self._logits(x)
        return x, *self._route(logits, first=first)


CORRECTION = "gate.e_score_correction_bias"
"""The name of the scores' correction in most checkpoints."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token goes to, besides those that the router chooses.

    Attributes:
        name: In checkpoints: ``shared_experts``.
        intermediate_size: Its width; of several that checkpoints hold as one, theirs together.
        gated: Whether its output has a factor for each token, the sigmoid of a product with ``NAME_gate``.
    """

    name: str
    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """The mixtures of experts of a model.

    Attributes:
        routing: How a token's experts are chosen.
        intermediate_size: Width of an expert.
        dense_layers: The layers that have an ordinary MLP.
        shared: The expert of all tokens, if there is one.
        router: What checkpoints call the router.
        router_bias: Whether its logits have a bias.
        correction: Their name, in the mixture, of the correction that is added to scores when experts are chosen; empty: there is
            none.
        correction_dims: Its dimensions in checkpoints: 1, or 2 where it is a matrix of one row.
        block: What checkpoints call the mixture.
        projections: What they call an expert's gate, up and down.
        joined: The activation of experts, if checkpoints hold all experts of a layer in one tensor; None: they do not.
        stacked: Whether checkpoints hold each projection of all of a layer's experts as one tensor: transposed, with an expert's
            outputs last, or by ``rows``, with its inputs last. None: each expert has tensors of its own.
        scales_inputs: Whether a token's weight multiplies its expert's input, not the output; a token then has one expert.
    """

    routing: Routing
    intermediate_size: int
    dense_layers: frozenset[int] = frozenset()
    shared: SharedExpert | None = None
    router: str = "gate"
    router_bias: bool = False
    correction: str = ""
    correction_dims: int = 1
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    joined: ClampedGate | None = None
    stacked: Stacked | None = None
    scales_inputs: bool = False


def _experts(
    hidden_size: int, config: SparseConfig, activation: Gate, shared: int, context: LayerContext
) -> Experts | JoinedExperts:
    sizes = hidden_size, config.intermediate_size, config.routing.experts, config.routing.chosen
    if config.joined is not None:
        return JoinedExperts(*sizes, activation=config.joined, context=context)
    stacked, names = config.stacked, config.projections
    return Experts(*sizes, projections=names, activation=activation, stacked=stacked, shared=shared, context=context)


def _shared_as(config: SparseConfig, shared: GatedMLP | None, context: LayerContext) -> int:
    """As how many additional experts the shared one may be computed; 0: it is computed separately."""
    parallel = context.parallel
    alone = parallel.tp.size == parallel.ep.size == 1 and not parallel.redundant_experts
    if (
        shared is None
        or config.shared is None
        or config.shared.gated
        or config.scales_inputs
        or config.stacked is not None
    ):
        return 0
    if not context.ops.joins_shared or context.adapted or not alone or parallel.expert_exchange is not None:
        return 0
    if not all(isinstance(each.method, DenseMethod) for each in (shared.gate_up, shared.down)):
        return 0
    count, rest = divmod(config.shared.intermediate_size, config.intermediate_size)
    return 0 if rest else count


class SparseMLP(Layer):
    """The sum of the experts that each token goes to, and of the shared one: where the device has kernels for experts and its
    numbers are those of some experts, it is computed as so many more that all tokens go to.

    Args:
        hidden_size: Width in and out.
        config: The mixture.
        activation: The activation of the experts' gates.
        context: Where and how it is built.

    Attributes:
        hidden_size: The argument.
        joined: As how many additional experts the shared one is computed, once weights are prepared.
        ranks: Sums what ranks have of the output; None: there is one.
    """

    def __init__(self, hidden_size: int, config: SparseConfig, *, activation: Gate, context: LayerContext) -> None:
        super().__init__()
        self.hidden_size, self._name = hidden_size, context.prefix
        self._scales_inputs = config.scales_inputs
        self._exchange = context.parallel.expert_exchange
        group = context.split_over
        self.ranks = None if group is None else RankSum(group, "layers of experts")
        self.shared: GatedMLP | None = None
        self._gate: WeightSlots = {}
        if config.shared is not None:
            inside = context.inside(config.shared.name)
            width = config.shared.intermediate_size
            self.shared = GatedMLP(hidden_size, width, activation=activation, bias=False, context=inside, summed=False)
            if config.shared.gated:
                empty = torch.empty(1, hidden_size, dtype=context.dtype, device=context.device)
                self._gate[f"{inside.prefix}_gate.weight"] = WeightSlot(empty)
        shared = _shared_as(config, self.shared, context)
        self.experts = _experts(hidden_size, config, activation, shared, context.inside("experts"))
        self.joined = self.experts.shared if isinstance(self.experts, Experts) else 0
        self.router = Router(
            hidden_size,
            replace(config.routing, shared=self.joined),
            bias=config.router_bias,
            correction=config.correction and context.inside(config.correction).prefix,
            correction_dims=config.correction_dims,
            context=context.inside(config.router),
        )

    @property
    def kind(self) -> CutKind | None:
        """Which table gives the number of chunks for many rows; None: all rows at once, because there is nothing to sum, or
        because the experts' exchange must not overlap with sums."""
        return None if self.ranks is None or self.experts.places.exchanges else self.ranks.kind

    def slots(self) -> WeightSlots:
        return self._gate

    @property
    def renewal(self) -> Renewal:
        return "refuse" if self.joined else "copy"  # a shared expert lies among the others, and has no slots any more

    @property
    def weight_name(self) -> str:
        return f"{self._name}.weight"

    def finish(self) -> None:
        if self.joined and self.shared is not None:
            parts = self.shared.gate_up.method, self.shared.down.method
            assert isinstance(self.experts, Experts) and all(isinstance(each, DenseMethod) for each in parts)
            self.experts.join(*(each.weight for each in parts if isinstance(each, DenseMethod)))
            self.shared = None

    def forward(self, hidden: Tensor, norm: RMSNorm | None, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one."""
        if self.ranks is None:
            return self._alone(hidden, norm, residual)
        pieces = None if self.kind is None else self.ranks.pieces(hidden, norm)
        if pieces is None:
            return self.ranks(self._part(hidden, norm), residual)
        done = 0

        def next_part(rows: Tensor) -> Tensor:
            nonlocal done
            first, done = done, done + len(rows)
            return self._part(rows, None, first=first)

        return self.ranks.of_pieces(next_part, pieces, residual)

    def _alone(self, hidden: Tensor, norm: RMSNorm | None, residual: Tensor | None) -> Tensor:
        """:meth:`forward` where nothing is left to sum."""
        # Without a norm the input may be the residual itself, which the shared expert has yet to read.
        adds = norm is not None and self._exchange is None
        result = self._part(hidden, norm, residual if adds else None)
        if residual is None or adds:
            return result
        residual += result
        return residual

    def _part(self, hidden: Tensor, norm: RMSNorm | None, add_to: Tensor | None = None, *, first: int = 0) -> Tensor:
        """[T, hidden_size], a step's rows from ``first`` on, normed first by ``norm`` -> this rank's part of the sum,
        [T, hidden_size]; of one rank it may be added to ``add_to`` in place, which is returned then."""
        x, ids, weights = self.router(hidden, norm, first)
        taken = x
        if self._scales_inputs:
            taken, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        result: Tensor
        if self._exchange is None:
            result = self.experts(taken, ids, weights, add_to)
        else:
            result = self._exchange(taken, ids, weights, self.experts, self.experts.places.holders, self.router.counts)
        if self.shared is not None and not self._gate:
            result = self.shared(x, None, result)  # adds in its last product, if that product can add
        elif self.shared is not None:
            shared = self.shared(x, None)
            for gate in self._gate.values():
                shared *= F.linear(x, gate.target).sigmoid()
            result += shared
        return result
