"""Routers that spread tokens evenly over experts: random weights send tokens that are alike to the same experts."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.ops.cuda import CudaOps
from sapwood_kernels.ops.device import RouteTokens


def route_uniformly(most_tokens: int) -> None:
    """From now on models on a GPU choose experts by random numbers, the same in each step, in place of their router's logits.

    Logits are computed all the same. For one process's models: other ranks know nothing of it.

    Args:
        most_tokens: Of a step.
    """
    router = CudaOps.router

    def uniform(ops: CudaOps, routing: Routing, correction: Tensor | None, counts: Tensor) -> RouteTokens:
        choose = router(ops, routing, correction, counts)
        noise = torch.rand(most_tokens, routing.experts, device=ops.device)
        return lambda logits: choose(noise[: len(logits)])

    CudaOps.router = uniform  # type: ignore[method-assign]
