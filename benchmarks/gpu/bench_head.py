"""Products of an output head on a GPU: int8 by ``sapwood_kernels.quantised.triton_digits`` in many tiles, compared with bfloat16.

The head is an 8B's, 128256 x 4096, with the norm before it. Each product is launched for two copies of its weight in turns, in a
CUDA graph. What is not within a rounding to 16 bits of the float32 product of the rounded weight is an error and is not timed.
Prints one JSON object a line, for each number of rows bfloat16's first and the fastest tile last. About 40 seconds on an H200.

    python benchmarks/gpu/bench_head.py [--processes 14]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bench_few_rows import drawn, microseconds
from commit import measured_commit
from torch import Tensor

from sapwood_kernels import triton_gemv, triton_norm, triton_rows
from sapwood_kernels.quantised import triton_digits
from sapwood_kernels.quantised.int8 import round_weight, weight_product
from sapwood_kernels.quantised.triton_digits import Tile

ROWS, COLUMNS = 128256, 4096
FEW = 64
"""Rows of inputs up to which logits are float32."""
TILES = {
    16: [(16, 128, 128, 4, 4), (16, 128, 256, 4, 3), (16, 64, 256, 4, 3), (8, 128, 256, 4, 3), (8, 64, 256, 4, 3)],
    32: [(32, 128, 128, 4, 3), (32, 128, 128, 4, 4), (32, 64, 128, 4, 5)],
    64: [(64, 128, 128, 4, 3), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (64, 256, 128, 8, 3)],
    256: [(64, 128, 128, 4, 3), (64, 128, 64, 4, 4), (64, 256, 128, 8, 4), (128, 128, 128, 8, 4)],
}
"""Rows of inputs -> tiles that are tried up to them."""
COUNTS = 1, 8, 16, 32, 64, 128, 256


def tiles(count: int) -> list[Tile]:
    return [Tile(*each) for each in TILES[min(most for most in TILES if count <= most)]]


def dtype(count: int) -> torch.dtype:
    return torch.float32 if count <= FEW else torch.bfloat16


def wide(x: Tensor, weight: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """The product with a bfloat16 weight, as a worker computes it."""
    if len(x) == 1:
        return triton_gemv.gemv(x, weight, norm=norm, dtype=torch.float32)
    normed = triton_norm.rms_norm(x, *norm)
    few = triton_rows.few_rows(weight)
    if few is not None and len(x) <= few[1]:
        return few[0](normed, dtype=torch.float32)
    return F.linear(normed, weight)


def compile_some(part: int, parts: int) -> None:
    """Compiles a part of all kernels: those of int8 know no rows of a weight."""
    norm = torch.ones(COLUMNS, device="cuda"), 1e-5
    weight, scales = torch.zeros(2048, COLUMNS, dtype=torch.int8, device="cuda"), torch.ones(2048, 1, device="cuda")
    jobs = [(count, tile) for count in COUNTS for tile in tiles(count)]
    for count, tile in jobs[part::parts]:
        triton_digits.product(drawn(count, COLUMNS), weight, scales, norm=norm, dtype=dtype(count), tile=tile)
    torch.cuda.synchronize()


def measure(
    count: int, wides: list[Tensor], copies: list[tuple[Tensor, Tensor]], norm: tuple[Tensor, float]
) -> Iterator[dict[str, Any]]:
    x = drawn(count, COLUMNS)
    yield {
        "rows": count,
        "kind": "bfloat16",
        "us": round(microseconds([lambda w=w: wide(x, w, norm) for w in wides]), 2),
    }  # type: ignore[misc]
    wanted = weight_product(x, *copies[0], norm=norm, dtype=torch.float32)
    found = []
    for tile in tiles(count):

        def product(weight: Tensor, scales: Tensor, tile: Tile = tile) -> Tensor:
            return triton_digits.product(x, weight, scales, norm=norm, dtype=dtype(count), tile=tile)

        error = float((product(*copies[0]).float() - wanted).norm() / wanted.norm())
        line: dict[str, Any] = {"rows": count, "kind": "int8", "tile": tile, "error": round(error, 7)}
        if error < (1e-4 if count <= FEW else 0.005):
            value = microseconds([lambda each=each, product=product: product(*each) for each in copies])  # type: ignore[misc]
            found.append((value, tile))
            line |= {"us": round(value, 2), "tb_s": round(ROWS * COLUMNS / value / 1e6, 2)}
        yield line
    if found:
        value, best = min(found)
        yield {"rows": count, "kind": "int8, fastest", "tile": best, "us": round(value, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=14, help="That compile (default: 14).")
    processes = parser.parse_args().processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(compile_some, [(part, 2 * processes) for part in range(2 * processes)], chunksize=1)
    torch.manual_seed(0)
    about = {"device": torch.cuda.get_device_name(), "commit": measured_commit()}
    norm = torch.rand(COLUMNS, device="cuda") + 0.5, 1e-5
    weight = drawn(ROWS, COLUMNS) / COLUMNS**0.5
    codes, scales = round_weight(weight)
    for count in COUNTS:
        for line in measure(count, [weight, weight.clone()], [(codes, scales), (codes.clone(), scales)], norm):
            print(json.dumps(line | about), flush=True)


if __name__ == "__main__":
    main()
