"""``--deterministic`` beside the usual kernels on one GPU: what it costs, and whether it holds. Prints one JSON object a line.

``products`` and ``attention``: an 8B's by tile, products beside torch's. ``decode``: a step of so many requests, both ways, and a
prompt of 8192 tokens. ``equal``: as many prompts as asked, in batches of 1, 7, 64 and 256: how many answers differ from those in
batches of 1, in tokens or in any bit of a log probability; and how many do without the mode.

    python benchmarks/gpu/bench_deterministic.py --model benchmarks/gpu/configs/llama-3.1-8b
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from bench_engine import STEP_TOKENS, Engine, prompts_of
from commit import measured_commit
from step_profile import record

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.attention.fixed_order import FixedOrderAttention
from sapwood_kernels.attention.planned import AttentionShape, PagedKeys, StoredPages, Variant
from sapwood_kernels.attention.triton_prefill import AlikeTile
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.triton_fixed_order import FixedOrderProduct, Tile, tile_of

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ASKED = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
Answer = tuple[list[int], list[float]]


def report(what: str, value: float, unit: str, **more: object) -> None:
    """Prints a figure."""
    where = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": measured_commit(),
    }
    print(
        json.dumps({"what": what, "value": round(value, 4), "unit": unit, "engine": "sapwood", **more, **where}),
        flush=True,
    )


def products(rows: list[int], device: str) -> None:
    """Microseconds of each layer's product by tile, and of torch's."""
    for name, (outputs, inputs) in SHAPES.items():
        # Together they do not fit in the cache.
        copies = 3 if outputs * inputs > 50_000_000 else 6
        weights = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / 64 for _ in range(copies)]
        gate = "silu" if name == "gate_up" else None
        for count in rows:
            x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
            found = {"torch": _timed([partial(F.linear, x, weight) for weight in weights])}
            for tile in _tiles(count, gated=gate is not None):
                made = [FixedOrderProduct(weight, None, 132, tile=tile) for weight in weights]
                try:
                    found[str(tuple(tile))] = _timed([partial(product, x, gate=gate) for product in made])
                except Exception as error:  # a tile that does not fit says so, and the others are timed
                    print("#", name, count, tile, type(error).__name__, str(error)[:90], flush=True)
            report(f"product {name} {count}", min(found.values()), "us", tiles=found, gate=gate)


def _tiles(count: int, *, gated: bool) -> list[Tile]:
    """The tile that a product takes, and others."""
    at = max(16, triton.next_power_of_2(min(count, 256)))
    wide = 64 if gated else 128
    if count <= 64:
        others = [Tile(at, 64, 4, stages, inputs) for stages, inputs in ((4, 64), (6, 64), (3, 128), (4, 128))]
    elif count <= 256:
        others = [Tile(128, 64, 4, 4), Tile(128, 64, 4, 3, 128), Tile(256, 64, 8, 3), Tile(128, wide, 8, 4)]
    else:
        others = [Tile(128, wide, 8, 3), Tile(256, 64, 8, 3)]
    return list(dict.fromkeys([tile_of(count, gated=gated), *others]))


def _timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds of a call, in a graph where they take turns."""
    found = triton.testing.do_bench_cudagraph(lambda: [call() for call in calls], rep=20, return_mode="median")
    return round(float(found) * 1000 / len(calls), 1)


def attention(device: str) -> None:
    """Microseconds of a layer's attention by tile, 32 heads of 128 on 8: 64 requests of 1100 keys, one of 8192 tokens."""
    shape, variant = AttentionShape(32, 8, 128, 16, torch.bfloat16), Variant(128**-0.5, None, None)
    ops = device_ops(device)
    pages = 64 * 70
    cache = StoredPages(*torch.randn(2, 2 * pages, 16, 8, 128, device=device, dtype=torch.bfloat16))
    indices = torch.randperm(2 * pages, device=device)[:pages].to(torch.int32)
    tiles = [AlikeTile(64, keys, stages) for keys in (32, 64, 128) for stages in (2, 3, 4, 5)] + [AlikeTile(32, 64, 4)]
    for tokens, requests, keys in ((1, 64, 1100), (8192, 1, 8192)):
        counts = torch.arange(requests + 1, dtype=torch.int32)
        kept = PagedKeys(
            counts * -(-keys // 16), indices, torch.full((requests,), (keys - 1) % 16 + 1, dtype=torch.int32)
        )
        query = torch.randn(tokens * requests, 32, 128, device=device, dtype=torch.bfloat16)
        found: dict[str, float] = {}
        for tile in tiles:
            planned = FixedOrderAttention(None, indices, shape, variant, ops, tile)
            planned.plan(counts * tokens, kept)
            try:
                found[str(tuple(tile))] = _timed([partial(planned.run, query, cache)])
            except Exception as error:
                print("#", tile, type(error).__name__, str(error)[:90], flush=True)
        report(f"attention of {requests} x {tokens} over {keys}", min(found.values()), "us", tiles=found)


def answers(engine: Engine, prompts: list[list[int]], batch: int, length: int) -> list[Answer]:
    """The answers to prompts, so many at once."""
    found: dict[int, Answer] = {}
    for begin in range(0, len(prompts), batch):
        some = prompts[begin : begin + batch]
        engine.scheduler.flush_cache()
        first = engine.count + 1
        engine.add(some, [length] * len(some), ASKED)
        for outputs in engine.steps():
            for output in outputs:
                tokens, logprobs = found.setdefault(begin + output.serial - first, ([], []))
                tokens.extend(output.token_ids)
                logprobs.extend(each.logprob for each in output.logprobs)
    return [found[index] for index in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--only", default="products,attention,decode,equal", help="Which parts (default: all).")
    parser.add_argument("--prompts", type=int, default=1000, help="Of the part equal (default: 1000).")
    parser.add_argument("--length", type=int, default=8, help="Tokens of each answer of it (default: 8).")
    parser.add_argument("--batches", default="1,7,64,256", help="Of the part equal (default: 1,7,64,256).")
    parser.add_argument("--decodes", default="1,8,64,256", help="Of the part decode (default: 1,8,64,256).")
    parser.add_argument("--rows", default="1,16,64,8192", help="Of the part products (default: 1,16,64,8192).")
    parser.add_argument("--kv-gb", type=float, default=50.0, help="KV cache in GiB (default: 50).")
    parser.add_argument("--profile", type=Path, help="Folder for Chrome traces of decodes of 64.")
    parser.add_argument("--device", default="cuda", help="cpu: only to try it (default: cuda).")
    given = parser.parse_args()
    wanted = set(given.only.split(","))
    if "products" in wanted:
        products([int(each) for each in given.rows.split(",")], given.device)
    if "attention" in wanted:
        attention(given.device)
    if not wanted & {"decode", "equal"}:
        return
    draw = random.Random(3)
    prompts = [[draw.randint(10, 99999) for _ in range(draw.randint(20, 300))] for _ in range(given.prompts)]
    usual: dict[str, float] = {}
    for fixed in (False, True):
        backend = "fixed_order" if fixed else "auto"
        dtype = "bfloat16" if given.device == "cuda" else "float32"
        options = {"deterministic": fixed, "attention_backend": backend, "dtype": dtype}
        engine = Engine(given.model, 256, STEP_TOKENS, given.kv_gb, device=given.device, **options)
        name = f"{given.model.name} {'deterministic' if fixed else 'usual'}"
        report(f"{name} start", engine.start_seconds, "s")
        times: dict[str, float] = {}
        if "decode" in wanted:
            for batch in map(int, given.decodes.split(",")):
                with engine.decoding(batch, length=130) as step:
                    if batch == 64 and given.profile is not None:
                        _, kernels = record(
                            lambda step=step: [step() for _ in range(10)], given.profile / f"{fixed}.json.gz"
                        )
                        for kernel, microseconds in list(kernels.items())[:10]:
                            report(f"{name} decode 64 {kernel[:60]}", microseconds / 10, "us a step")
                    times[f"decode {batch}"] = min(engine.time_steps(step, 40)["steady"] for _ in range(2))
            long = prompts_of(1, 8192, seed=1)
            times["prefill 8192"] = min(engine.generate(long, [1]) for _ in range(4)) * 1000
        for what, value in times.items():
            report(f"{name} {what}", value, "ms")
            if fixed:
                report(f"{name} {what} ratio", value / usual[what], "of usual")
        usual = usual or times
        if "equal" in wanted:
            # Without the mode a few show enough.
            some = prompts if fixed else prompts[:200]
            batches = [int(each) for each in given.batches.split(",")]
            alone = answers(engine, some, batches[0], given.length)
            for batch in batches[1:]:
                got = answers(engine, some, batch, given.length)
                tokens = sum(mine[0] != theirs[0] for mine, theirs in zip(got, alone, strict=True))
                bits = sum(mine != theirs for mine, theirs in zip(got, alone, strict=True))
                report(f"{name} batch {batch}: answers with other tokens", tokens, f"of {len(some)}")
                report(f"{name} batch {batch}: answers with any other bit", bits, f"of {len(some)}")
        engine.close()
        del engine
        if given.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
