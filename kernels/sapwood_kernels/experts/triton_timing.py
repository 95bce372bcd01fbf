"""Times the experts' products on the GPU, for :mod:`sapwood_kernels.experts.tiles.tuning`."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from sapwood_kernels.experts.stack import DenseStack, StoredStack
from sapwood_kernels.experts.tiles.plan import TileShape
from sapwood_kernels.experts.tiles.triton_align import align
from sapwood_kernels.experts.tiles.tuning import Part
from sapwood_kernels.experts.triton_experts import product, weighted_sum
from sapwood_kernels.experts.triton_few_tokens import first, second
from sapwood_kernels.experts.triton_gate import Gate

_DRAWS, _ROUNDS = 4, 3
"""Choices of experts that take turns, so that matrices are not found in the L2 cache; and how often each is timed."""


class ProductTimer:
    """Implements ``Measure`` by the weights of a layer, with tokens spread evenly over its experts.

    Timed with the first product is sorting, with the second the sum.

    Args:
        gate_up: The matrices of the first product.
        down: Those of the second.
        chosen: How many experts a token goes to.
        dtype: The dtype of activations.
        gate: The activation.
        shared: To how many of them, the last ones, all tokens go.
    """

    def __init__(
        self,
        gate_up: DenseStack | StoredStack,
        down: DenseStack | StoredStack,
        chosen: int,
        dtype: torch.dtype,
        gate: Gate,
        shared: int = 0,
    ) -> None:
        self._stacks = {"gate_up": gate_up, "down": down}
        self._widths = {"gate_up": down.outputs, "down": gate_up.outputs // 2}
        self._chosen, self._dtype, self._gate, self._shared = chosen, dtype, gate, shared

    def __call__(self, pairs: int, height: int, part: Part, shape: TileShape) -> float:
        stack = self._stacks[part]
        device = (stack.weight if isinstance(stack, DenseStack) else stack.codes).device
        draws = [self._ids(pairs, stack.experts, device) for _ in range(_DRAWS)]
        weights = torch.rand(len(draws[0]), self._chosen, device=device)

        def numbers(rows: int, width: int) -> Tensor:
            return torch.randn(rows, width, dtype=self._dtype, device=device)

        def run(ids: Tensor) -> None:
            if height == 1 and part == "gate_up":
                first(x, ids, stack, self._gate, shape)
            elif height == 1:
                second(x, ids, weights, stack, shape)
            elif part == "gate_up":
                product(x, stack, align(ids, stack.experts, height), pairs, self._chosen, shape, self._gate)
            else:
                weighted_sum(product(x, stack, aligned[id(ids)], pairs, 1, shape), ids, weights, stack.experts)

        if part == "gate_up":
            x = numbers(pairs // self._chosen, self._widths[part])
        else:
            x = numbers(pairs, self._widths[part])
            aligned = {id(ids): align(ids, stack.experts, height) for ids in draws if height > 1}
        try:
            run(draws[0])
        except (triton.CompilationError, triton.OutOfResources, RuntimeError):
            return math.inf
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()  # launched one by one, small products would wait for the host
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for ids in draws:
                run(ids)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        best = math.inf
        for _ in range(_ROUNDS):
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            best = min(best, before.elapsed_time(after) / 1000 / _DRAWS)
        return best

    def _ids(self, pairs: int, experts: int, device: torch.device) -> Tensor:
        noise = torch.rand(pairs // self._chosen, experts, device=device)
        noise[:, experts - self._shared :] += 1.0
        return noise.topk(self._chosen, -1).indices.int()
