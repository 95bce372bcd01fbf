"""Layers with states over prompts on a GPU: kernels compared with plain torch and with what must be computed or moved at least.

One layer of each kind, of the widths of a model, takes 8192 tokens: one prompt, and eight. Prints one JSON object a line: for
each layer its time in a CUDA graph, its parts by torch's profiler, torch's time, and the error of the result against torch's in
float32; then the tiles of recurrences, and the fastest for ``triton_span_scan.TILES``. About two minutes on an H200.

    python benchmarks/gpu/bench_state_kernels.py [--layers qwen3-next,...] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from commit import measured_commit
from torch import Tensor

from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.state.spans import Spans, tables
from sapwood_kernels.state.triton_prompts import TritonPrompts
from sapwood_kernels.state.triton_span_inverse import inverses
from sapwood_kernels.state.triton_span_scan import Delta, Tile, scan
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.layers.layer import LayerContext
from sapwood_worker.model.layers.state.gated_delta_net import GatedDeltaConfig
from sapwood_worker.model.layers.state.lightning_attention import LightningConfig
from sapwood_worker.model.layers.state.mamba1 import Mamba1Config
from sapwood_worker.model.layers.state.mamba2 import Mamba2Config
from sapwood_worker.model.layers.state.short_convolution import ShortConvolutionConfig
from sapwood_worker.model.layers.state.state_layer import StateConfig, StateLayer
from sapwood_worker.model.pools.state_pool import StatePlan, StatePool
from sapwood_worker.model.quantization.registry import LinearMethods

FLOPS, BYTES = 790e12, 4.3e12
"""What an H200 was seen to compute of bfloat16, and to copy, in a second."""


def mamba2(heads: int, groups: int) -> Mamba2Config:
    return Mamba2Config(heads, 64, groups, 128, 4, 1e-5, convolution_bias=True, bias=False, output_bias=False)


LAYERS: dict[str, tuple[int, StateConfig]] = {
    "qwen3-next": (2048, GatedDeltaConfig(16, 32, 128, 128, taps=4, eps=1e-6)),
    "nemotron-h-8b": (4096, mamba2(128, 8)),
    "granite-4-h-small": (4096, mamba2(128, 1)),
    "minimax-text": (6144, LightningConfig(64, 128, layers=80)),
    "jamba-mini": (4096, Mamba1Config(8192, 16, 4, 256, 1e-6, convolution_bias=True, bias=False)),
    "lfm2-8b": (2048, ShortConvolutionConfig(2048, 3, bias=False)),
}
"""Width of the residual stream, and the layer."""
TINY: dict[str, tuple[int, StateConfig]] = {
    "qwen3-next": (32, GatedDeltaConfig(1, 2, 16, 16, taps=4, eps=1e-6)),
    "nemotron-h-8b": (32, Mamba2Config(2, 16, 1, 16, 4, 1e-5, convolution_bias=True, bias=False, output_bias=False)),
    "minimax-text": (32, LightningConfig(2, 16, layers=4)),
    "jamba-mini": (32, Mamba1Config(32, 16, 4, 8, 1e-6, convolution_bias=True, bias=False)),
    "lfm2-8b": (32, ShortConvolutionConfig(32, 3, bias=False)),
}
RECURRENCES = {
    "delta": (True, 32, 16, 128, 128),
    "space": (False, 128, 8, 128, 64),
    "linear": (False, 64, 64, 128, 128),
}
"""Whether it is the delta rule; heads, heads of keys, keys and values of each."""
TILES: dict[str, list[tuple[int, ...]]] = {
    "delta": [(16, 4, 2), (32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 8, 2)],
    "space": [(32, 4, 2), (32, 4, 3), (16, 4, 2), (32, 8, 2), (64, 4, 2), (64, 4, 3), (64, 8, 2), (32, 4, 3, 32), (64, 4, 3, 32),
              (64, 8, 2, 128)],
    "linear": [(32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 2), (64, 4, 3, 32), (64, 8, 2, 128)],
}  # fmt: skip
PROMPTS = {"1x8192": [8192], "8x1024": [1024] * 8}
CHECKED = 512
"""Tokens of each prompt whose results are compared with those of float64."""
MOST_ERROR = 0.02
"""Of a tile that may be the fastest; bfloat16 makes about 0.007."""
NO_SAVES = np.zeros((0, 3), np.int64)


class Bench:
    """The device, and how a call is timed there."""

    def __init__(self, *, tiny: bool) -> None:
        self.tiny = tiny
        self.ops = device_ops("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16

    def microseconds(self, call: Callable[[], object], *, graph: bool = True) -> float:
        """Of a call: in a graph the third shortest of seven, else the second."""
        if self.tiny:
            call()
            return 0.0
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if not graph:
            return (time.perf_counter() - begin) * 1e6
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        times: list[float] = []
        for _ in range(8):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            captured.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1000)
        return sorted(times[1:])[2]

    def kernels(self, call: Callable[[], object]) -> dict[str, float]:
        """Microseconds of the kernels of a call, by name, the longest ones."""
        if self.tiny:
            return {}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        for each in seen.events():
            times[each.name[:48]] += each.device_time
        return {name: round(time, 1) for name, time in times.most_common(9)}


def layer(bench: Bench, width: int, config: StateConfig, dtype: torch.dtype, *, by_kernels: bool) -> StateLayer:
    ops = device_ops(bench.ops.device)
    ops.state_prompts = TritonPrompts() if by_kernels else None
    made = config.build(width, 1, LayerContext(dtype, ops, LinearMethods("none", dtype, ops), Parallel(), "layer"))
    torch.manual_seed(1)
    for slot in made.weights().values():
        spread = 0.3 if slot.target.ndim < 2 else slot.target.shape[-1] ** -0.5
        slot.target.copy_(torch.randn(slot.target.shape, device=bench.ops.device) * spread)
    made.prepare()
    return made


def plan_of(made: StateLayer, config: StateConfig, counts: list[int], bench: Bench) -> StatePlan:
    pool = StatePool([1], len(counts), 0, config.numbers, bench.ops.device)
    return pool.plan(np.arange(len(counts)), np.array(counts), NO_SAVES, made._ops)  # type: ignore[arg-type]


def floor(made: StateLayer, width: int, tokens: int) -> float:
    """Microseconds in which a layer's products can be computed."""
    numbers = sum(slot.target.numel() for slot in made.weights().values() if slot.target.ndim == 2)
    return 2 * numbers * tokens / FLOPS * 1e6


@torch.inference_mode()
def measure(
    bench: Bench, name: str, width: int, config: StateConfig, prompts: dict[str, list[int]]
) -> Iterator[dict[str, Any]]:
    ours = layer(bench, width, config, bench.dtype, by_kernels=True)
    exact = layer(bench, width, config, torch.float32, by_kernels=False)
    torchs = layer(bench, width, config, bench.dtype, by_kernels=False)
    for kind, counts in prompts.items():
        tokens = sum(counts)
        hidden = torch.randn(tokens, width, device=bench.ops.device)

        def call(
            made: StateLayer, dtype: torch.dtype, counts: list[int] = counts, hidden: Tensor = hidden
        ) -> Callable[[], Tensor]:
            plan, given = SimpleNamespace(states=plan_of(made, config, counts, bench)), hidden.to(dtype)
            return lambda: made.forward(given, None, None, plan)  # type: ignore[arg-type]

        got, wanted = call(ours, bench.dtype)(), call(exact, torch.float32)()
        error = float((got.float() - wanted).norm() / wanted.norm())
        del got, wanted
        run = call(ours, bench.dtype)
        yield {
            "layer": name, "prompts": kind, "us": round(bench.microseconds(run), 1),
            "floor_us": round(floor(ours, width, tokens), 1), "error": round(error, 5),
            "torch_us": round(bench.microseconds(call(torchs, bench.dtype), graph=False)), "kernels_us": bench.kernels(run),
        }  # fmt: skip


class Recurrence:
    """Inputs of a recurrence alone."""

    def __init__(self, bench: Bench, name: str, counts: list[int]) -> None:
        self.delta, heads, key_heads, keys, values = RECURRENCES[name]
        if bench.tiny:
            heads, key_heads, keys, values = 2, 1, 16, 16
        self.total = sum(counts)
        device = bench.ops.device

        def drawn(*shape: int) -> Tensor:
            return torch.randn(self.total, *shape, device=device)

        self.qk = drawn(2 * key_heads * keys).to(bench.dtype)
        self.q, self.k = (each.view(-1, key_heads, keys) for each in self.qk.chunk(2, 1))
        self.v, self.decay, self.step = (
            drawn(heads, values).to(bench.dtype),
            -drawn(heads).abs(),
            drawn(heads).sigmoid(),
        )
        self.states = torch.zeros(len(counts), heads * keys * values, device=device)
        firsts = np.cumsum(counts, dtype=np.int64) - np.array(counts)
        self.spans: Spans = tables(firsts, np.array(counts), np.arange(len(counts)), NO_SAVES, bench.ops.to_device)
        self.solved = None
        self.sizes = key_heads, keys
        if self.delta:
            self.solved = Delta(*self.inverses())

    def inverses(self) -> tuple[Tensor, Tensor, Tensor]:
        return inverses(self.qk, self.decay, self.step, self.spans, *self.sizes, "tf32")

    def exact(self) -> Tensor:
        """What the recurrence gives, token by token in float64."""
        counts = (self.spans.pieces[:, 0] - self.spans.spans[:, 1]).tolist()
        firsts = self.spans.spans[:, 1].long()
        q, k = (each.double().repeat_interleave(self.v.shape[1] // each.shape[1], 1) for each in (self.q, self.k))
        v, decay, step = self.v.double(), self.decay.double().exp(), self.step.double()
        if self.delta:
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
            q = q * q.shape[-1] ** -0.5
        state = v.new_zeros(len(counts), *k.shape[1:], v.shape[-1])
        out = torch.zeros_like(v)
        for at in range(counts[0]):  # all prompts of a kind have one length
            rows = firsts + at
            state *= decay[rows, :, None, None]
            written = v[rows]
            if self.delta:
                written = written - (state * k[rows, :, :, None]).sum(2)
            state += k[rows, :, :, None] * (written * step[rows, :, None])[:, :, None]
            out[rows] = (state * q[rows, :, :, None]).sum(2)
        return out

    def scan(self, tile: Tile) -> Tensor:
        out = torch.empty_like(self.v)
        scan(
            self.q, self.k, self.v, self.decay, self.states, self.spans, out, key_major=self.delta, delta=self.solved,
            step=None if self.delta else self.step, tile=tile,
        )  # fmt: skip
        return out

    @property
    def floor(self) -> float:
        """Microseconds in which inputs are read and outputs written once."""
        held = [self.qk, self.v, self.v, self.decay, self.step, self.states, self.states]
        held += [] if self.solved is None else [self.solved.inverse, self.solved.q_factors, self.solved.k_factors]
        return sum(each.nbytes for each in held) / BYTES * 1e6


@torch.inference_mode()
def sweep(bench: Bench, name: str, prompts: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    fastest = {}
    for kind, counts in prompts.items():
        checked = Recurrence(bench, name, [min(each, CHECKED) for each in counts])
        wanted = checked.exact()
        some = Recurrence(bench, name, counts)
        if some.delta:
            yield {"recurrence": "inverses", "prompts": kind, "us": round(bench.microseconds(some.inverses), 1)}
        for tile in (Tile(*each) for each in TILES[name][: 2 if bench.tiny else None]):
            line: dict[str, Any] = {
                "recurrence": name,
                "prompts": kind,
                "tile": list(vars_of(tile)),
                "floor_us": round(some.floor, 1),
            }
            try:
                checked.states.zero_()
                error = float((checked.scan(tile).double() - wanted).norm() / wanted.norm())
                spent = bench.microseconds(lambda each=some, by=tile: each.scan(by))  # type: ignore[misc]
            except Exception as reason:  # it asks for more shared memory than there is, say
                yield line | {"failed": str(reason)[:150]}
                continue
            if error < MOST_ERROR:
                fastest[kind, tile] = spent
            yield line | {"us": round(spent, 1), "error": round(error, 5)}
    for kind in prompts:
        ranked = sorted((spent, vars_of(tile)) for (of, tile), spent in fastest.items() if of == kind)
        yield {"fastest": name, "prompts": kind, "tiles": [[round(spent, 1), *tile] for spent, tile in ranked[:3]]}


def print_sweep(tiny: bool, name: str, prompts: dict[str, list[int]], about: dict[str, Any]) -> None:
    """Prints a recurrence's tiles; on a GPU from a process of its own, since a fault ends all that a process can do there."""
    if not tiny and multiprocessing.parent_process() is None:
        process = multiprocessing.get_context("spawn").Process(target=print_sweep, args=(tiny, name, prompts, about))
        process.start()
        process.join()
        if process.exitcode:
            print(json.dumps({"recurrence": name, "failed": f"the process ended with {process.exitcode}"}), flush=True)
        return
    for line in sweep(Bench(tiny=tiny), name, prompts):
        print(json.dumps(line | about), flush=True)


def vars_of(tile: Tile) -> tuple[int, int, int, int]:
    return tile.values, tile.warps, tile.stages, tile.chunk


def compile_some(name: str, tile: tuple[int, ...]) -> None:
    """Compiles a tile, so that processes share the compiler's work."""
    try:
        Recurrence(Bench(tiny=False), name, [64]).scan(Tile(*tile))
        torch.cuda.synchronize()
    except Exception as reason:
        print(json.dumps({"recurrence": name, "tile": tile, "failed": str(reason)[:150]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS), help="Which layers (default: all).")
    parser.add_argument("--recurrences", default=",".join(RECURRENCES), help="Whose tiles are measured (default: all).")
    parser.add_argument(
        "--tiny", action="store_true", help="Small sizes on a CPU by Triton's interpreter: whether it runs at all."
    )
    arguments = parser.parse_args()
    bench = Bench(tiny=arguments.tiny)
    recurrences = [each for each in arguments.recurrences.split(",") if each]
    prompts = {"1x70": [70], "2x5": [5, 5]} if bench.tiny else PROMPTS
    about: dict[str, Any] = {"commit": measured_commit()}
    if not bench.tiny:
        about["device"] = torch.cuda.get_device_name()
        with multiprocessing.get_context("spawn").Pool(8) as pool:
            pool.starmap(compile_some, [(name, tile) for name in recurrences for tile in TILES[name]], chunksize=1)
    layers = TINY if bench.tiny else LAYERS
    for name in arguments.layers.split(","):
        if name in layers:
            for line in measure(bench, name, *layers[name], prompts):
                print(json.dumps(line | about), flush=True)
    for name in recurrences:
        print_sweep(bench.tiny, name, prompts, about)


if __name__ == "__main__":
    main()
