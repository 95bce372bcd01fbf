"""Products of one 16-bit row on a GPU: ``sapwood_kernels.triton_gemv`` in many tiles, compared with cuBLAS and ``triton_rows``.

Weights are those of ``bench_few_rows.py``, and each product is launched as there. A tile counts if its result is right. Prints a
JSON object for each product: the least time, that of reading its weight; the tile that is used, cuBLAS (without a gate), and the
fastest tiles, for ``triton_gemv.TILES``, with their time where each kernel waits for the one ahead. About a minute on an H200.

    python benchmarks/gpu/bench_one_row.py [--model 8b|qwen3-30b-a3b|70b-of-4] [--normed] [--processes 12]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from bench_few_rows import MODELS, Product, drawn, microseconds
from commit import measured_commit
from torch import Tensor

from sapwood_kernels import dependent_launch, reference, triton_gemv, triton_rows

Tile = tuple[int, int, int]
BYTES_A_SECOND = 4.3e12
SHOWN = 6
"""Tiles of a product that are printed."""


def tiles(product: Product) -> list[Tile]:
    """Those in which a thread has neither few nor too many numbers."""
    weights = 2 if product.gated else 1
    return [
        (rows, columns, warps)
        for rows in (1, 2, 4, 8)
        for columns in (512, 1024, 2048, 4096, 8192)
        for warps in (1, 2, 4, 8)
        if columns <= product.columns and 16 <= rows * columns * weights // (32 * warps) <= 128
    ]


def run(product: Product, x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None, tile: Tile | None) -> Tensor:
    gate = "silu" if product.gated else None
    return triton_gemv.gemv(x, weight, norm=norm, gate=gate, dtype=product.dtype, blocks=tile)


def norm_of(product: Product, normed: bool) -> tuple[Tensor, float] | None:
    return (torch.rand(product.columns, device="cuda") + 0.5, 1e-5) if normed else None


def compile_some(model: str, normed: bool, part: int, parts: int) -> None:
    """Compiles a part of all kernels."""
    jobs = [(product, tile) for product in MODELS[model].values() for tile in tiles(product)]
    for product, tile in jobs[part::parts]:
        weight = torch.zeros(product.rows, product.columns, device="cuda", dtype=torch.bfloat16)
        run(product, drawn(1, product.columns), weight, norm_of(product, normed), tile)
    torch.cuda.synchronize()


def measure(name: str, product: Product, normed: bool) -> dict[str, Any]:
    copies = max(2, min(12, int(500e6 // (product.rows * product.columns * 2)) + 1))
    weights = [drawn(product.rows, product.columns) / product.columns**0.5 for _ in range(copies)]
    x, norm = drawn(1, product.columns), norm_of(product, normed)
    plain = x.float() if norm is None else reference.rms_norm(x.float(), *norm)
    wanted = F.linear(plain, weights[0].float())
    if product.gated:
        wanted = F.silu(wanted[:, : product.outputs]) * wanted[:, product.outputs :]

    def took(tile: Tile | None) -> float:
        return microseconds([lambda each=each: run(product, x, each, norm, tile) for each in weights])  # type: ignore[misc]

    found = []
    for tile in tiles(product):
        got = run(product, x, weights[0], norm, tile).float()
        if float((got - wanted).norm() / wanted.norm()) < 0.006:
            found.append((round(took(tile), 2), tile))
    found = sorted(found)[:SHOWN]
    with mock.patch.object(dependent_launch, "options", lambda x: {"PDL": False}):
        waiting = [(round(took(tile), 2), tile) for _, tile in found]
    line = {
        "product": name, "normed": normed, "unit": "us", "least": round(weights[0].nbytes / BYTES_A_SECOND * 1e6, 2),
        "used": round(took(None), 2), "tiles": found, "each waits for the one ahead": waiting,
        "cuBLAS": round(microseconds([lambda each=each: F.linear(x, each) for each in weights]), 2),  # type: ignore[misc]
    }  # fmt: skip
    few = [triton_rows.few_rows(each) for each in weights]
    if not normed and all(few):
        gate = "silu" if product.gated else None
        calls = [lambda each=each: each[0](x, gate=gate, dtype=product.dtype) for each in few if each]  # type: ignore[misc]
        line["few rows"] = round(microseconds(calls), 2)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b", help="Whose weights (default: %(default)s).")
    parser.add_argument("--normed", action="store_true", help="With a norm before each product.")
    parser.add_argument("--processes", type=int, default=12, help="That compile (default: 12).")
    arguments = parser.parse_args()
    parts = 3 * arguments.processes
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        jobs = [(arguments.model, arguments.normed, part, parts) for part in range(parts)]
        pool.starmap(compile_some, jobs, chunksize=1)
    torch.manual_seed(0)
    about = {"device": torch.cuda.get_device_name(), "commit": measured_commit()}
    for name, product in MODELS[arguments.model].items():
        print(json.dumps(measure(name, product, arguments.normed) | about), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
