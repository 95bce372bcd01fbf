"""Routers that spread tokens evenly over experts, or as unevenly as is wanted; random weights send like tokens to one expert."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.contracts import RouteTokens
from sapwood_kernels.ops.cuda import CudaOps


def route_uniformly(most_tokens: int, rank: int = 0, skew: float = 0.0) -> None:
    """From now on models on a GPU choose experts by random numbers, the same in each step, in place of their router's logits.

    Logits are computed all the same, by weights of 16 bits, as most checkpoints have them. Ranks that make the same models choose
    the same. A row of a step chooses the same experts in every step, so that the load of decodes is as even as one step's is: of
    B rows by chance, of one row not at all.

    Args:
        most_tokens: Of a step, of all ranks.
        rank: Where ranks choose for rows of their own, whose: rows of others choose others.
        skew: Standard deviation of the logarithms of how likely a layer's experts are to come first; 0: all alike.
    """
    router, made = CudaOps.router, count()

    def uniform(
        ops: CudaOps, routing: Routing, correction: Tensor | None, counts: Tensor, ranks: int = 1
    ) -> RouteTokens:
        # Made-up corrections would choose the same experts for all tokens.
        even = None if correction is None else torch.zeros_like(correction)
        choose = router(ops, routing, even, counts, ranks)
        before = rank if ranks == 1 else 0  # else each rank chooses for the rows of all
        numbers = torch.Generator(ops.device).manual_seed(next(made))
        noise = torch.rand(most_tokens, routing.experts, device=ops.device, generator=numbers)
        if skew:
            likely = torch.randn(routing.experts, device=ops.device, generator=numbers) * skew
            noise = likely - noise.log().neg().log()  # Gumbel's: without replacement, by their weights

        def choose_evenly(logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
            start = before * len(logits) + first
            return choose(noise[start : start + len(logits)], first)

        return choose_evenly

    def of_checkpoint(
        ops: CudaOps, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        # Checkpoints have routers in 16 bits; made-up numbers of 32 would be multiplied otherwise.
        return logits(ops, weight.copy_(weight.to(dtype)), bias, dtype)

    logits = CudaOps.router_logits
    CudaOps.router, CudaOps.router_logits = uniform, of_checkpoint  # type: ignore[method-assign]
