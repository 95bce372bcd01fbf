"""The kernels of a mixture's layer on one GPU, with tokens spread evenly over experts. One JSON object a line.

``layer``: microseconds of the router's product and of the slots of what it chose, compared with torch's; of experts by the tiles
that a first start finds, and the least time; and of all between the norm and the residual, by tiles that are not measured.
``tiles``: whether tiles that were found are within 3 % of the best of all heights and a grid of shapes, for the 18 numbers of
tokens that a start measures: both are timed again in turns, so that chance favours neither.

    python benchmarks/gpu/bench_experts.py                              # layer, Qwen3-30B-A3B's shape; about 30 s
    python benchmarks/gpu/bench_experts.py --only tiles --seconds 45
    TRITON_INTERPRET=1 python benchmarks/gpu/bench_experts.py --shape tiny --tokens 1,20     # tries it without a GPU
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from commit import measured_commit
from torch import Tensor

from sapwood_kernels import triton_norm
from sapwood_kernels.experts import triton_experts, triton_routing
from sapwood_kernels.experts.routing import Routing
from sapwood_kernels.experts.stack import DenseStack
from sapwood_kernels.experts.tiles.plan import FEW_TOKENS, HEIGHTS, TilePlan, TileShape, candidates
from sapwood_kernels.experts.tiles.triton_align import align
from sapwood_kernels.experts.tiles.tuning import TOKENS, Measure, Part
from sapwood_kernels.experts.triton_timing import ProductTimer
from sapwood_kernels.ops.cuda import CudaOps
from sapwood_kernels.ops.device import DeviceOps
from sapwood_kernels.triton_activation import silu_mul

GRID = [TileShape(*each) for each in product((32, 64, 128, 256), (64, 128), (4, 8), (3, 4))]
ALONE = [TileShape(*each, 1) for each in product((2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8))]
SHARED_BYTES = 227 << 10
MIXTURES = 4
"""Copies of a mixture's weights that take turns."""
LAYERS = 64
"""Copies of small weights that take turns, so that they are not found in the L2 cache."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BYTES_A_SECOND, PRODUCTS_A_SECOND = 4.3e12, 0.7e15


class Sizes(NamedTuple):
    """Of a mixture."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    shared: int = 0


SHAPES = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768), "deepseek-v2-lite": Sizes(64, 6, 2048, 1408, 2), "tiny": Sizes(16, 4, 256, 128, 1),
}  # fmt: skip
Try = tuple[int, int, Part, TileShape]


def timer_of(sizes: Sizes, experts: int = 0) -> Measure:
    """Times a layer of these sizes, or of fewer experts, for what that compiles."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(experts or sizes.experts, *shape, device=DEVICE, dtype=torch.bfloat16) / 30

    if DEVICE.type == "cpu":
        return lambda pairs, height, part, shape: 1e-6 * (height + shape.width + pairs)
    stacks = DenseStack(numbers(2 * sizes.inner, sizes.hidden)), DenseStack(numbers(sizes.hidden, sizes.inner))
    return ProductTimer(*stacks, sizes.chosen, torch.bfloat16, "silu")


def compile_some(sizes: Sizes, tries: list[Try]) -> None:
    """Compiles kernels into Triton's cache."""
    timer = timer_of(sizes, 16)
    for each in tries:
        timer(*each)


def fits(height: int, shape: TileShape) -> bool:
    """Whether what is under way has room in shared memory."""
    return height == 1 or 2 * (height + shape.width) * shape.depth * (shape.stages - 1) <= SHARED_BYTES


def timed(run: Callable[[int], object], copies: int = LAYERS) -> float:
    """Microseconds of a call, of so many in a CUDA graph: the quickest of five replays."""
    run(0)
    if DEVICE.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in range(copies):
            run(each)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = math.inf
    for _ in range(5):
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after) * 1000 / copies)
    return best


class Bench:
    """Args: name: the shape's; sizes: it; report: prints."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        self.name, self.sizes = name, sizes
        self.where = {
            "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
            "commit": measured_commit(),
        }
        self.measure = cache(timer_of(sizes))

    def report(self, what: str, **found: Any) -> None:
        """Prints a line."""
        print(json.dumps({"what": f"{self.name} {what}"} | found | self.where), flush=True)

    def seconds(self, pairs: int, plan: TilePlan, again: Measure | None = None) -> float:
        """Of both products with what belongs to them."""
        measure = again or self.measure
        return measure(pairs, plan.height, "gate_up", plan.gate_up) + measure(pairs, plan.height, "down", plan.down)

    def best(self, pairs: int, tried: dict[int, list[TileShape]]) -> TilePlan:
        """The fastest plan of some shapes by height."""
        plans = [
            TilePlan(
                height,
                *(min(shapes, key=partial(self._of, pairs, height, part)) for part in ("gate_up", "down")),  # type: ignore[arg-type]
            )
            for height, shapes in tried.items()
        ]
        return min(plans, key=lambda plan: self.seconds(pairs, plan))

    def found(self, tokens: int) -> TilePlan:
        """What a first start finds."""
        experts, chosen, *_ = self.sizes
        tried = candidates(tokens * chosen, experts, chosen)
        return self.best(tokens * chosen, {height: list(shapes) for height, shapes in tried.items()})

    def router(self, tokens: int) -> None:
        """Prints what choosing experts takes."""
        experts, chosen, hidden, *_ = self.sizes
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
        weights = (torch.randn(LAYERS, experts, hidden, device=DEVICE) / hidden**0.5).bfloat16().float()
        ops = CudaOps(DEVICE)
        ours = [ops.router_logits(each, None, x.dtype) for each in weights]
        right = x.double() @ weights[0].double().t()
        found = ours[0](x), F.linear(x.float(), weights[0])
        wrong = [float((each.view(tokens, -1, experts).double().sum(1) - right).abs().max()) for each in found]
        self.report(
            f"router {tokens}", us=timed(lambda at: ours[at](x)), torch_us=timed(lambda at: F.linear(x.float(), weights[at])),
            largest_error=wrong[0], torch_error=wrong[1],
        )  # fmt: skip
        table = torch.randint(experts, (experts + 1, 4), device=DEVICE)
        copies = torch.ones(experts + 1, dtype=torch.int64, device=DEVICE)
        ids = torch.randint(experts, (tokens, chosen), device=DEVICE).int()
        mine, theirs = (partial(each, table, copies, ids, 0) for each in (ops.turns, partial(DeviceOps.turns, ops)))
        assert torch.equal(mine().long(), theirs().long())
        self.report(f"slots {tokens}", us=timed(lambda at: mine()), torch_us=timed(lambda at: theirs()))

    def experts(self, tokens: int) -> None:
        """Prints what a layer's experts take, without shared ones."""
        experts, chosen, hidden, inner, _ = self.sizes
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
        plan = self.found(tokens)
        if plan.height > 1 and DEVICE.type == "cuda":
            stack = DenseStack(torch.randn(experts, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16) / 30)
            draws = [torch.rand(tokens, experts, device=DEVICE).topk(chosen, -1).indices.int() for _ in range(4)]
            sorted_by = [align(each, experts, plan.height) for each in draws]
            multiply = partial(
                triton_experts.product, x, stack, pairs=tokens * chosen, share=chosen, shape=plan.gate_up
            )
            self.report(
                f"first product and gate {tokens}", us=timed(lambda at: multiply(sorted_by[at], gate="silu"), 4),
                apart_us=timed(lambda at: silu_mul(multiply(sorted_by[at])), 4),
            )  # fmt: skip
        taken = self.seconds(tokens * chosen, plan)
        self.report(f"experts {tokens}", us=taken * 1e6, floor_us=self.least(tokens) * 1e6, plan=plan)

    def mixture(self, tokens: int) -> None:
        """Prints what norm, router and all experts take together, of layers after each other, added to a residual."""
        experts, chosen, hidden, inner, shared = self.sizes
        every = chosen + shared
        ops, scale = CudaOps(DEVICE), 1 / hidden**0.5
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
        counts = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
        choose = ops.router(Routing(experts, chosen, renormalise=True, shared=shared), None, counts)
        layers = []
        for _ in range(MIXTURES):
            weight, norm = torch.randn(experts, hidden, device=DEVICE) * scale, torch.rand(hidden, device=DEVICE) + 0.5
            weight = weight.bfloat16().float()  # as checkpoints have it
            stacks = [
                DenseStack(torch.randn(experts + shared, *shape, device=DEVICE, dtype=torch.bfloat16) * scale)
                for shape in ((2 * inner, hidden), (hidden, inner))
            ]
            layers.append((
                partial(triton_norm.rms_norm, weight=norm, eps=1e-6), ops.router_logits(weight, None, x.dtype),
                partial(ops.normed_logits(weight, None).product, x, norm, 1e-6), ops.expert_sum(*stacks, "silu", every, shared),
            ))  # fmt: skip

        def run(at: int) -> None:
            norm, logits, both, summed = layers[at % MIXTURES]
            if tokens <= triton_routing.FEW:
                normed, found = both()
            else:
                normed = norm(x)
                found = logits(normed)
            summed(normed, *choose(found), add_to=x)

        self.report(f"mixture {tokens}", us=timed(run, 2 * MIXTURES), floor_us=self.least(tokens, shared) * 1e6)

    def least(self, tokens: int, shared: int = 0) -> float:
        """Seconds in which the matrices of the experts, and of so many that all tokens go to, can be read, or multiplied."""
        experts, chosen, hidden, inner, _ = self.sizes
        hit, numbers = shared + experts * (1 - (1 - chosen / experts) ** tokens), 3 * hidden * inner
        return max(hit * 2 * numbers / BYTES_A_SECOND, 2 * numbers * tokens * (chosen + shared) / PRODUCTS_A_SECOND)

    def compile(self, shapes: Mapping[int, Sequence[TileShape]], processes: int) -> None:
        """Compiles products in tiles of some shapes by height, side by side."""
        began, parts = time.monotonic(), get_args(Part)
        tries: list[Try] = [
            (self.sizes.chosen * FEW_TOKENS, height, part, shape)
            for height, some in shapes.items()
            for part in parts
            for shape in some
        ]
        if processes > 1:
            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                jobs = [
                    pool.apply_async(compile_some, (self.sizes, tries[first::processes])) for first in range(processes)
                ]
                for job in jobs:
                    job.get()
        self.report("compiled", kernels=len(tries), seconds=time.monotonic() - began)

    def tiles(self, seconds: float, processes: int) -> None:
        """Prints how near what a start finds comes to the best there is."""
        began = time.monotonic()
        chosen, worst = self.sizes.chosen, 0.0
        heights = {height: [shape for shape in GRID if fits(height, shape)] for height in HEIGHTS}
        grids: list[tuple[int, dict[int, list[TileShape]]]] = [
            (tokens, heights | ({1: ALONE} if tokens <= FEW_TOKENS else {})) for tokens in TOKENS
        ]
        self.compile(heights | {1: ALONE}, processes)
        again = timer_of(self.sizes)
        for tokens, grid in grids:
            if time.monotonic() - began > seconds:
                self.report(f"tiles {tokens}", left_out=True)
                continue
            pairs = tokens * chosen
            plans = self.found(tokens), self.best(pairs, grid)
            mine, best = (
                min(taken)
                for taken in zip(
                    *(tuple(self.seconds(pairs, plan, again) for plan in plans) for _ in range(4)), strict=True
                )
            )
            worst = max(worst, mine / best)
            self.report(
                f"tiles {tokens}", us=mine * 1e6, best_us=best * 1e6, ratio=mine / best, plan=plans[0], best=plans[1]
            )
        self.report("tiles, the worst of them", ratio=worst, seconds=time.monotonic() - began)

    def _of(self, pairs: int, height: int, part: Part, shape: TileShape) -> float:
        return self.measure(pairs, height, part, shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-30b-a3b", help="Which (default: %(default)s).")
    parser.add_argument("--only", choices=("layer", "tiles"), default="layer", help="Which (default: layer).")
    parser.add_argument("--tokens", default="1,8,64,256,8192", help="Of a layer (default: %(default)s).")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="After which no size of tiles begins (default: 60)."
    )
    parser.add_argument("--processes", type=int, default=12, help="That compile tiles (default: 12).")
    given = parser.parse_args()
    bench = Bench(given.shape, SHAPES[given.shape])
    if given.only == "tiles":
        bench.tiles(given.seconds, given.processes)
    else:
        tokens = [int(each) for each in given.tokens.split(",")]
        for each in tokens:
            bench.router(each)
        experts, chosen, *_ = bench.sizes
        tried: dict[int, dict[TileShape, None]] = {}
        for each in tokens:
            for height, shapes in candidates(each * chosen, experts, chosen).items():
                tried.setdefault(height, {}).update(dict.fromkeys(shapes))
        bench.compile({height: list(shapes) for height, shapes in tried.items()}, given.processes)
        for each in tokens:
            bench.experts(each)
            bench.mixture(each)


if __name__ == "__main__":
    main()
