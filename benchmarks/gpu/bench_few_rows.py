"""Products of few 16-bit rows on a GPU: cuBLAS compared with ``sapwood_kernels.triton_rows`` in many tiles, for the weights of a
model.

Each product is launched for as many copies of its weight as do not fit in the L2 cache, in a CUDA graph. A tile counts if its
result is right and three launches give the same. Prints one JSON object a line; a product's last has the tiles that were faster
than cuBLAS, for ``triton_rows.TILES``. About two minutes on an H200, a quarter of them Triton's compiler in several processes.

    python benchmarks/gpu/bench_few_rows.py [--model 8b|qwen3-30b-a3b|deepseek-v2-lite|70b-of-4] [--processes 12]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from commit import measured_commit
from torch import Tensor

from sapwood_kernels import triton_activation, triton_rows
from sapwood_kernels.triton_rows import Tile

AT = {16: 8, 32: 32, 64: 64}
"""Most rows that a tile is for -> rows with which it is timed."""
NARROW = {
    16: [(32, 128, 1, 4, 6), (32, 256, 1, 4, 5), (16, 256, 1, 4, 6), (32, 256, 2, 4, 4), (64, 128, 2, 4, 5), (64, 128, 4, 4, 4),
         (64, 128, 8, 4, 4), (64, 256, 4, 4, 3), (128, 64, 4, 4, 5), (64, 128, 1, 4, 5), (64, 64, 1, 4, 8), (32, 128, 1, 4, 8),
         (32, 128, 2, 4, 6), (32, 128, 4, 4, 6), (16, 256, 2, 4, 6), (64, 128, 3, 4, 4)],
    32: [(32, 256, 1, 4, 4), (64, 128, 2, 4, 4), (64, 128, 4, 4, 4), (64, 64, 4, 4, 5), (128, 64, 4, 4, 4), (128, 64, 8, 4, 4)],
    64: [(64, 128, 4, 4, 3), (128, 64, 4, 4, 4), (128, 64, 8, 4, 4), (128, 128, 4, 8, 3)],
}  # fmt: skip
GATED = {
    16: [(16, 256, 1, 4, 4), (32, 128, 1, 4, 4), (32, 128, 1, 4, 6), (32, 256, 1, 4, 3), (64, 64, 1, 4, 4), (64, 64, 1, 4, 6),
         (64, 128, 1, 4, 3), (64, 128, 1, 8, 4), (64, 128, 2, 4, 3), (64, 64, 2, 4, 4), (32, 128, 2, 4, 4), (64, 128, 3, 4, 3),
         (128, 64, 2, 8, 3), (128, 64, 1, 8, 4)],
    32: [(32, 128, 1, 4, 4), (64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (64, 128, 1, 8, 3)],
    64: [(64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (64, 128, 1, 8, 3), (128, 64, 1, 8, 3)],
}  # fmt: skip
WIDE = {
    16: [(32, 256, 1, 4, 4), (64, 64, 1, 4, 6), (64, 128, 1, 4, 4), (64, 128, 1, 4, 6), (64, 256, 1, 4, 3), (128, 64, 1, 4, 5),
         (128, 128, 1, 8, 3)],
    32: [(64, 128, 1, 4, 4), (128, 64, 1, 4, 4), (128, 64, 1, 8, 4)],
    64: [(128, 64, 1, 4, 4), (128, 64, 1, 8, 4), (128, 128, 1, 8, 3)],
}  # fmt: skip


class Product(NamedTuple):
    """A layer's: weight [rows, columns], and what goes along with it."""

    rows: int
    columns: int
    tiles: dict[int, list[tuple[int, int, int, int, int]]]
    gated: bool = False
    adds: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gated else self.rows

    def ours(self, x: Tensor, weight: Tensor, ended: Tensor, tile: Tile, total: Tensor | None) -> Tensor:
        gate = "silu" if self.gated else None
        return triton_rows.product(x, weight, ended, tile, gate=gate, add_to=total, dtype=self.dtype)

    def torchs(self, x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        if total is not None:
            return total.addmm_(x, weight.t())
        return triton_activation.silu_mul(F.linear(x, weight)) if self.gated else F.linear(x, weight)

    def total(self, count: int, dtype: torch.dtype) -> Tensor | None:
        return drawn(count, self.outputs).to(dtype) if self.adds else None


MODELS = {
    "8b": {
        "gate_up": Product(28672, 4096, GATED, gated=True),
        "down": Product(4096, 14336, NARROW, adds=True),
        "qkv": Product(6144, 4096, NARROW),
        "o": Product(4096, 4096, NARROW, adds=True),
        "head": Product(128256, 4096, WIDE, dtype=torch.float32),
    },
    "qwen3-30b-a3b": {
        "qkv": Product(5120, 2048, NARROW),
        "o": Product(2048, 4096, NARROW, adds=True),
        "head": Product(151936, 2048, WIDE, dtype=torch.float32),
    },
    "deepseek-v2-lite": {
        "down": Product(3648, 2048, NARROW),  # queries and latents
        "o": Product(2048, 2048, NARROW, adds=True),
        "head": Product(102400, 2048, WIDE, dtype=torch.float32),
    },
    "70b-of-4": {  # a rank's share; sums over ranks, not the product, add to the residual
        "gate_up": Product(14336, 8192, GATED, gated=True),
        "down": Product(8192, 7168, NARROW),
        "qkv": Product(2560, 8192, NARROW),
        "o": Product(8192, 2048, NARROW),
        "head": Product(32064, 8192, WIDE, dtype=torch.float32),
    },
}
COMPILED = 512, 2048
"""Columns and rows of the small weight with which a kernel is compiled: it knows no sizes."""
FASTER = 0.985
COPIES = 12


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def compile_some(model: str, part: int, parts: int) -> None:
    """Compiles a part of all kernels."""
    columns, rows = COMPILED
    jobs = [(each, most, tile) for each in MODELS[model].values() for most in each.tiles for tile in each.tiles[most]]
    weight, ended = drawn(rows, columns), torch.zeros(rows, dtype=torch.int32, device="cuda")
    for product, most, tile in jobs[part::parts]:
        outputs = rows // 2 if product.gated else rows
        total = drawn(most, outputs) if product.adds else None
        product.ours(drawn(most, columns), weight, ended, Tile(*tile), total)
    torch.cuda.synchronize()


def microseconds(launches: list[Callable[[], Any]]) -> float:
    """Of each of these launches, one after another in a CUDA graph; the best of five."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    best = float("inf")
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1000 / len(launches)


def is_right(product: Product, weight: Tensor, ended: Tensor, tile: Tile, count: int) -> bool:
    x, total = drawn(count, product.columns), product.total(count, product.dtype)
    wanted = x.float() @ weight.float().t()
    if product.gated:
        wanted = F.silu(wanted[:, : product.outputs]) * wanted[:, product.outputs :]
    if total is not None:
        wanted += total.float()
    same = [product.ours(x, weight, ended, tile, None if total is None else total.clone()) for _ in range(3)]
    near = float((same[0].float() - wanted).norm() / wanted.norm()) < 0.005
    return near and all(torch.equal(each, same[0]) for each in same)


def measure(name: str, product: Product) -> Iterator[dict[str, Any]]:
    """Lines about a product; the last has its fastest tiles."""
    count = max(2, min(COPIES, int(600e6 // (product.rows * product.columns * 2)) + 1))
    weights = [drawn(product.rows, product.columns) / product.columns**0.5 for _ in range(count)]
    ended = torch.zeros(16384, dtype=torch.int32, device="cuda")
    every = weights * max(1, COPIES // count)

    def ours(rows: int, tile: Tile) -> float:
        x, total = drawn(rows, product.columns), product.total(rows, product.dtype)
        return microseconds([lambda each=each: product.ours(x, each, ended, tile, total) for each in every])  # type: ignore[misc]

    def torchs(rows: int) -> float:
        x, total = drawn(rows, product.columns), product.total(rows, torch.bfloat16)
        return microseconds([lambda each=each: product.torchs(x, each, total) for each in every])  # type: ignore[misc]

    before = {rows: torchs(rows) for rows in (1, 2, 4, 8, 16, 32, 64)}
    yield {"product": name, "cuBLAS": {rows: round(each, 2) for rows, each in before.items()}, "unit": "us"}
    faster = []
    for most, tiles in product.tiles.items():
        found = []
        for tile in (Tile(*each) for each in tiles):
            try:
                right = is_right(product, weights[0], ended, tile, most - 3)
            except Exception as error:  # it asks for more shared memory than there is, say
                yield {"product": name, "most": most, "tile": tile, "error": str(error)[:150]}
                ended.zero_()
                continue
            if right:
                found.append((ours(AT[most], tile), tile))
                yield {"product": name, "rows": AT[most], "tile": tile, "value": round(found[-1][0], 2), "unit": "us"}
            else:
                yield {"product": name, "most": most, "tile": tile, "error": "is wrong"}
        if found and min(found)[0] < FASTER * before[AT[most]]:
            faster.append((most, min(found)[1]))
    yield {"tiles": [[product.rows, product.columns], faster]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12, help="That compile (default: 12).")
    parser.add_argument("--model", choices=MODELS, default="8b", help="Whose weights (default: %(default)s).")
    arguments = parser.parse_args()
    parts = 3 * arguments.processes
    with multiprocessing.get_context("spawn").Pool(parts // 3) as pool:
        pool.starmap(compile_some, [(arguments.model, part, parts) for part in range(parts)], chunksize=1)
    torch.manual_seed(0)
    about = {"device": torch.cuda.get_device_name(), "commit": measured_commit()}
    for name, product in MODELS[arguments.model].items():
        for line in measure(name, product):
            print(json.dumps(line | about), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
