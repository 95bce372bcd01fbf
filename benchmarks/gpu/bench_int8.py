"""Products of int8 weights and activations on a GPU, for the four shapes of an 8B model's layer and 8192 rows: by tile, with what
goes along with them; and what rounds their input. Each result is compared with torch's definition. One JSON object a line.

    python benchmarks/gpu/bench_int8.py [--rows 8192]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from bench_few_rows import drawn, microseconds
from commit import measured_commit

from sapwood_kernels import reference
from sapwood_kernels.quantised import int8, triton_int8

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TILES = (
    (128, 128, 128, 4, 3),
    (128, 128, 64, 4, 4),
    (128, 256, 128, 8, 3),
    (128, 256, 128, 8, 4),
    (128, 256, 64, 8, 4),
    (256, 128, 128, 8, 3),
    (256, 128, 128, 8, 4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="Of the input (default: 8192).")
    given = parser.parse_args()
    torch.manual_seed(0)
    about = {"rows": given.rows, "device": torch.cuda.get_device_name(), "commit": measured_commit()}

    def say(what: str, **found: Any) -> None:
        print(json.dumps({"what": what} | found | about), flush=True)

    for name, (rows, columns) in SHAPES.items():
        x, weight = drawn(given.rows, columns), torch.randint(-127, 128, (rows, columns), device="cuda").to(torch.int8)
        scales = torch.rand(rows, 1, device="cuda") / 5000
        norm = (torch.ones(columns, device="cuda"), 1e-5) if name in ("qkv", "gate_up") else None
        value = microseconds([partial(triton_int8.quantise_rows, x, norm=norm)])
        say("rounding", shape=name, normed=norm is not None, us=round(value, 1))
        if name == "down":
            wide = drawn(given.rows, 2 * columns)
            value = microseconds([partial(triton_int8.quantise_rows, wide, gate="silu")])
            say("rounding", shape=name, gated=True, us=round(value, 1))
        codes, own = triton_int8.quantise_rows(x)
        for gate in (None, "silu") if name == "gate_up" else (None,):
            wanted = int8.product(x[:64], weight, scales)
            wanted = wanted if gate is None else reference.silu_mul(wanted)
            for tile in TILES:
                product = partial(triton_int8.multiply, codes, own, weight, scales, torch.bfloat16, tile, gate=gate)
                try:
                    error = float((product()[:64] - wanted).norm() / wanted.norm())
                    value = microseconds([product])
                except Exception as failure:
                    say("product", shape=name, gate=gate, tile=tile, failed=str(failure)[-200:])
                    continue
                tops = 2 * given.rows * rows * columns / value / 1e6
                say(
                    "product",
                    shape=name,
                    gate=gate,
                    tile=tile,
                    us=round(value, 1),
                    tops=round(tops),
                    error=round(error, 5),
                )


if __name__ == "__main__":
    main()
