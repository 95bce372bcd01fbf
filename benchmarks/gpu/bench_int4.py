"""Products with 4-bit groups of 128 on a GPU, for the four shapes of an 8B model's layer: a row alone by what a program takes,
and the layer of four products; 8 to 512 rows; bfloat16 next to them.

Each product is launched for as many copies of its weight as do not fit in the L2 cache, in a CUDA graph. What is not within
bfloat16's rounding of the float32 product is an error and is not timed. Prints one JSON object a line, the fastest last.
About 60 seconds on an H200, half of them Triton's compiler in several processes.

    python benchmarks/gpu/bench_int4.py [--processes 12] [--beside OLD/triton_one.py]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_few_rows import drawn, microseconds
from commit import measured_commit
from torch import Tensor

from sapwood_kernels import reference
from sapwood_kernels.quantised import triton_few, triton_many, triton_one
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise, round_to_groups
from sapwood_kernels.quantised.triton_one import Blocks

PROCESSORS = 132


class Shape(NamedTuple):
    """A product of a layer: weight [rows, columns], what goes along with it, and what is tried for one row."""

    rows: int
    columns: int
    ones: list[tuple[int, int, int, int]]
    normed: bool = False
    gated: bool = False
    adds: bool = False


SHAPES = {
    "qkv": Shape(6144, 4096, [(4, 1, 1, 4), (4, 2, 1, 2), (8, 1, 1, 2)], normed=True),
    "o": Shape(4096, 4096, [(4, 1, 1, 4), (4, 2, 1, 4), (8, 1, 1, 2)], adds=True),
    "gate_up": Shape(28672, 4096, [(8, 1, 2, 2), (4, 1, 2, 2)], normed=True, gated=True),
    "down": Shape(4096, 14336, [(4, 2, 1, 4)], adds=True),
}
COPIES = 8
COUNTS = 16, 32, 64, 128, 256, 512


def weights_of(shape: Shape, copies: int = 1) -> list[GroupedWeight]:
    first = round_to_groups(drawn(shape.rows, shape.columns) / shape.columns**0.5, 128)
    others = range(copies - 1)
    return [
        first,
        *(
            replace(first, **{each: getattr(first, each).clone() for each in ("codes", "scales", "zeros")})
            for _ in others
        ),
    ]


def one(kernel: Any, shape: Shape, x: Tensor, weight: GroupedWeight, out: Tensor | None, **others: Any) -> Tensor:
    norm = (torch.ones(shape.columns, device="cuda"), 1e-5) if shape.normed else None
    return kernel(x, weight, norm=norm, gate="silu" if shape.gated else None, add_to=out, **others)  # type: ignore[no-any-return]


def error_of(
    shape: Shape, weight: GroupedWeight, count: int, product: Callable[[Tensor], Tensor], *, alone: bool
) -> float:
    """How far three products, one after another, are from float32's, as a part of its size."""
    wide = dequantise(weight)
    worst = 0.0
    for _ in range(3):
        x = drawn(count, shape.columns) * 2
        taken = x.float()
        if alone and shape.normed:
            taken = reference.rms_norm(taken, torch.ones(shape.columns, device="cuda"), 1e-5)
        wanted = taken @ wide.t()
        if alone and shape.gated:
            wanted = reference.silu_mul(wanted)
        worst = max(worst, float((product(x).float() - wanted).norm() / wanted.norm()))
    return worst


def compile_some(part: int, parts: int) -> None:
    """Compiles a part of all kernels."""
    jobs: list[tuple[Shape, Any]] = [(shape, each) for shape in SHAPES.values() for each in (*shape.ones, 8, *COUNTS)]
    for shape, each in jobs[part::parts]:
        weight = weights_of(shape)[0]
        if each == 8:
            one(
                triton_one.one_row, shape, drawn(1, shape.columns), weight, drawn(1, shape.rows) if shape.adds else None
            )
        try:
            if not isinstance(each, int):
                out = drawn(1, shape.rows) if shape.adds else None
                one(triton_one.one_row, shape, drawn(1, shape.columns), weight, out, blocks=Blocks(*each))
            elif each <= triton_few.MOST:
                triton_few.few_rows(drawn(each, shape.columns), weight)
            else:
                triton_many.product(drawn(each, shape.columns), weight, PROCESSORS)
        except Exception as error:
            print(json.dumps({"cannot": each, "error": str(error)[-200:]}), flush=True)
    torch.cuda.synchronize()


def measure_row(name: str, shape: Shape, copies: list[GroupedWeight], old: Any) -> Iterator[dict[str, Any]]:
    """A row alone; the last line has the fastest."""
    x, out = drawn(1, shape.columns), drawn(1, shape.rows) if shape.adds else None
    size = sum(each.nbytes for each in (copies[0].codes, copies[0].scales, copies[0].zeros) if each is not None)
    found: list[tuple[float, tuple[int, int, int, int] | None]] = []
    if old is not None:
        value = microseconds([lambda each=each: one(old.one_row, shape, x, each, out) for each in copies])
        yield {"what": "one row, before", "shape": name, "us": round(value, 2), "tb_s": round(size / value / 1e6, 2)}
    for tried in (None, *shape.ones):  # None: as the worker takes it
        blocks = None if tried is None else Blocks(*tried)

        def product(given: Tensor, blocks: Blocks | None = blocks) -> Tensor:
            zeros = torch.zeros(1, shape.rows, device="cuda", dtype=torch.bfloat16) if shape.adds else None
            return one(triton_one.one_row, shape, given, copies[0], zeros, blocks=blocks)

        try:
            error = error_of(shape, copies[0], 1, product, alone=True)
            if not error < 0.005:
                yield {"what": "one row", "shape": name, "blocks": tried, "wrong": error}
                continue
            value = microseconds(
                [
                    lambda each=each, blocks=blocks: one(triton_one.one_row, shape, x, each, out, blocks=blocks)
                    for each in copies
                ]
            )
        except Exception as failure:
            yield {"what": "one row", "shape": name, "blocks": tried, "error": str(failure)[-200:]}
            continue
        found.append((value, tried))
        yield {
            "what": "one row", "shape": name, "blocks": tried, "error": round(error, 6), "us": round(value, 2),
            "tb_s": round(size / value / 1e6, 2),
        }  # fmt: skip
    if found:
        value, tried = min(found, key=lambda each: each[0])
        yield {"what": "one row, fastest", "shape": name, "blocks": tried, "us": round(value, 2)}


def measure_rows(name: str, shape: Shape, copies: list[GroupedWeight], count: int) -> dict[str, Any]:
    """So many rows, compared with bfloat16."""
    first = dequantise(copies[0]).bfloat16()
    wide = [first, first.clone(), first.clone()]
    x = drawn(count, shape.columns)
    line: dict[str, Any] = {"what": "rows", "rows": count, "shape": name}
    line["bf16"] = round(microseconds([lambda each=each: F.linear(x, each) for each in wide]), 2)
    if 1 < count <= triton_few.MOST:
        line["few"] = round(microseconds([lambda each=each: triton_few.few_rows(x, each) for each in copies]), 2)
    if count > triton_few.MOST:
        many = partial(triton_many.product, processors=PROCESSORS)
        error = error_of(shape, copies[0], count, partial(many, weight=copies[0]), alone=False)
        value = microseconds([partial(many, x, each) for each in copies])
        line["many"] = round(value, 2) if error < 0.005 else f"wrong: {error}"
    return line


def measure_layer(copies: dict[str, list[GroupedWeight]], kernel: Any, blocks: dict[str, Any]) -> float:
    """us of a layer's four products, one after another as in a step."""
    row, inner, total = drawn(1, 4096), drawn(1, 14336), drawn(1, 4096)

    def launch(name: str, shape: Shape, weight: GroupedWeight) -> Callable[[], Any]:
        given, out = inner if name == "down" else row, total if shape.adds else None
        return lambda: one(kernel, shape, given, weight, out, **({"blocks": blocks[name]} if blocks else {}))

    every = [
        launch(name, shape, copies[name][i % len(copies[name])])
        for i in range(COPIES)
        for name, shape in SHAPES.items()
    ]
    return 4 * microseconds(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12, help="That compile (default: 12).")
    parser.add_argument("--beside", help="Another triton_one.py, whose kernel of one row is timed as well.")
    given = parser.parse_args()
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        pool.starmap(compile_some, [(part, 3 * given.processes) for part in range(3 * given.processes)], chunksize=1)
    torch.manual_seed(0)
    about = {"device": torch.cuda.get_device_name(), "commit": measured_commit()}
    print(json.dumps({"compiled": round(time.monotonic() - started, 1)} | about), flush=True)
    old = None
    if given.beside:
        spec = importlib.util.spec_from_file_location("old_one", given.beside)
        assert spec is not None and spec.loader is not None
        old = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(old)
    copies = {
        name: weights_of(shape, COPIES if shape.rows * shape.columns < 1 << 26 else 4) for name, shape in SHAPES.items()
    }
    best: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        for line in measure_row(name, shape, copies[name], old):
            print(json.dumps(line | about), flush=True)
            if "fastest" in line["what"]:
                best[name] = None if line["blocks"] is None else Blocks(*line["blocks"])
    if old is not None:
        print(
            json.dumps({"what": "layer, before", "us": round(measure_layer(copies, old.one_row, {}), 2)} | about),
            flush=True,
        )
    if len(best) == len(SHAPES):
        for what, blocks in (("layer, as it is", {}), ("layer, fastest", best)):
            value = measure_layer(copies, triton_one.one_row, blocks)
            print(json.dumps({"what": what, "us": round(value, 2), "blocks": blocks} | about), flush=True)
    for name, shape in SHAPES.items():
        for count in (1, 8, *COUNTS):
            print(json.dumps(measure_rows(name, shape, copies[name], count) | about), flush=True)


if __name__ == "__main__":
    main()
