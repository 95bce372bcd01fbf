"""Products with weights of few bits on a CUDA GPU, in the shapes of an 8B model, beside bfloat16. Checks them first.

Each weight has copies enough that none is in the L2 cache when its turn comes. Times are of a CUDA graph of many launches, the
best of three. With --tiles each kernel is tried with several tiles, until the time is spent. Prints one JSON object a line.

    python benchmarks/gpu/bench_quantised.py --tiles --seconds 60
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.quantised import triton_grouped, triton_int8, triton_row, triton_turned, triton_words
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise, round_to_groups

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS, GROUP = 32, 128
_SPREAD = 160e6
"""Bytes of a weight's copies together: three times the cache of an H100."""


def copies(make: Callable[[], Any], size: float) -> list[Any]:
    """As many of a weight as are not in the cache together."""
    return [make() for _ in range(max(2, -(-int(_SPREAD) // int(size))))]


def microseconds(run: Callable[[Any], object], weights: Sequence[Any], count: int) -> float:
    """The best time of a launch."""
    for weight in weights[:2]:
        run(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in itertools.islice(itertools.cycle(weights), count):
            run(weight)
    best = float("inf")
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / count * 1e3)
    return best


def int4(rows: int, columns: int) -> GroupedWeight:
    """A random weight."""
    return round_to_groups(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02, GROUP)


def check(processors: int) -> None:
    """Compares kernels with the definition.

    Raises:
        SystemExit: One is wrong.
    """
    torch.manual_seed(0)
    weight = int4(1024, 2048)
    wide = dequantise(weight)
    for count in (1, 5, 40, 200, 300):
        x = torch.randn(count, 2048, device="cuda", dtype=torch.bfloat16)
        wanted = x.float() @ wide.t()
        found = {"turned": triton_turned.product(x, weight, processors), "tiles": None}
        found["tiles"] = triton_grouped.product(
            x, weight, processors, triton_grouped.block_shape(count, 1024, processors)
        )
        if count == 1:
            found |= {"words": triton_words.row_product(x, weight), "row": triton_row.row_product(x, weight)}
        for name, got in found.items():
            assert got is not None
            error = float((got.float() - wanted).norm() / wanted.norm())
            print(json.dumps({"what": f"error of {name}, {count} rows", "value": round(error, 5)}), flush=True)
            if not error < 0.006:
                raise SystemExit(f"{name} is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="Try several tiles.")
    parser.add_argument("--seconds", type=float, default=60, help="After so long no other tile is tried (default: 60).")
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.seconds
    processors = device_ops("cuda").processors
    check(processors)

    def tried(
        kernel: Callable[..., object], weights: Sequence[Any], tiles: Sequence[Any], count: int
    ) -> dict[str, Any]:
        """The time of the kernel's own tile, and the best of others."""
        result: dict[str, Any] = {"us": round(microseconds(lambda w: kernel(w, None), weights, count), 1)}
        times: dict[Any, float] = {}
        for tile in tiles if arguments.tiles else ():
            if time.perf_counter() > end:
                result["cut off"] = True
                break
            try:
                times[tile] = microseconds(lambda w, tile=tile: kernel(w, tile), weights, count)
            except Exception as error:  # it does not fit
                result["refused"] = f"{tile}: {str(error)[:60]}"
        if times:
            best = sorted(times, key=times.__getitem__)[:3]
            result["best"] = [[list(tile), round(times[tile], 1)] for tile in best]
        return result

    total: dict[str, float] = {}

    def tell(what: str, result: dict[str, Any], name: str) -> None:
        total[what] = total.get(what, 0.0) + result["us"]
        print(json.dumps({"what": f"{what}, {name}"} | result), flush=True)

    x = {
        (count, k): torch.randn(count, k, device="cuda", dtype=torch.bfloat16)
        for count in (1, 64, 256)
        for k in (4096, 14336)
    }
    for name, (n, k) in SHAPES.items():
        some = copies(lambda n=n, k=k: int4(n, k), n * k * 0.53)
        dense = copies(lambda n=n, k=k: torch.randn(n, k, device="cuda", dtype=torch.bfloat16), n * k * 2)
        one = x[1, k]
        words = [
            (a, b, c)
            for a, b, c in itertools.product((1, 2, 4, 8), (128, 256, 512), (2, 4, 8))
            if 8 <= a * b / c / 32 <= 64
        ]
        tell(
            "1 row, words",
            tried(lambda w, t, one=one: triton_words.row_product(one, w, blocks=t), some, words, 40),
            name,
        )
        tell("1 row, bytes", tried(lambda w, t, one=one: triton_row.row_product(one, w, blocks=t), some, (), 40), name)
        tell("1 row, bfloat16", tried(lambda w, t, one=one: one @ w.t(), dense, (), 40), name)
        for count in (64, 256):
            rows = x[count, k]
            tall = (64,) if count == 64 else (128, 256)
            tiles = [
                (a, b, 64, c, d, e)
                for a, b, c, d, e in itertools.product(tall, (64, 128), (4, 8), (2, 3, 4), (1, 2, 4))
                if a * (64 + 64) * 2 * d <= 225000 and not (a == 256 and b == 128 and c == 4)
            ]
            left = lambda w, t, rows=rows: triton_turned.product(rows, w, processors, t)  # noqa: E731
            tell(f"{count} rows, weight on the left", tried(left, some, tiles, 10), name)
            shape = triton_grouped.block_shape(count, n, processors)
            right = lambda w, t, rows=rows, shape=shape: triton_grouped.product(rows, w, processors, shape)  # noqa: E731
            tell(f"{count} rows, weight on the right", tried(right, some, (), 10), name)
            tell(f"{count} rows, bfloat16", tried(lambda w, t, rows=rows: rows @ w.t(), dense, (), 10), name)
        del some, dense
    for name, (n, k) in SHAPES.items():
        big = torch.randn(8192, k, device="cuda", dtype=torch.bfloat16)
        codes, scales = torch.randint(-127, 128, (n, k), device="cuda").to(torch.int8), torch.rand(n, 1, device="cuda")
        tiles = [
            (128, 128, 128, 8, 3),
            (128, 128, 128, 4, 4),
            (128, 128, 64, 4, 4),
            (256, 128, 128, 8, 3),
            (128, 256, 64, 8, 4),
        ]
        whole = lambda w, t, big=big: triton_int8.product(big, w[0], w[1], processors, t)  # noqa: E731
        tell("8192 rows, int8", tried(whole, [(codes, scales)], tiles, 2), name)
        dense_one = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        tell("8192 rows, bfloat16", tried(lambda w, t, big=big: big @ w.t(), [dense_one], (), 2), name)
    for what, each in total.items():
        print(
            json.dumps({"what": f"{what}: {LAYERS} layers", "value": round(each * LAYERS / 1e3, 3), "unit": "ms"}),
            flush=True,
        )


if __name__ == "__main__":
    main()
