"""Adapters (LoRA) on one GPU: the engine alone, random weights of the true shape, random adapters for all linear layers.

First the model without the feature, then with it, in one process: every figure is a ratio to the base in the same run. Says
whether what was computed is right: kernels against plain torch on the model's own layers, and tokens of captured steps against
steps that are not captured. Prints one JSON object a line, then a table.

    python benchmarks/gpu/bench_lora.py --model benchmarks/gpu/configs/llama-3.1-8b
    python benchmarks/gpu/bench_lora.py --model benchmarks/gpu/configs/qwen3-30b-a3b --decodes 64:4 --slots 32 --prefill 8192
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from bench_engine import GREEDY, Engine, TimedRunner, prompts_of
from commit import measured_commit
from ranks import leave
from safetensors.torch import save_file

from sapwood_kernels.lora.layout import LoraPlace
from sapwood_kernels.lora.reference import TorchLora
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.lora import Lora, LoraLoad
from sapwood_worker.records.step import LaunchedStep, Step

STEP_TOKENS = 8192
READ = 4
"""Adapters that are read from files; slots hold copies of these."""
GOALS = {
    "base with adapters in slots, decode 64": 1.01, "base with adapters in slots, decode 256": 1.01,
    "base with adapters in slots, prefill": 1.01,
    "decode 64 over 1": 1.05, "decode 64 over 16": 1.10, "decode 64 over 32": 1.15, "decode 64 over 64": 1.25,
    "decode 256 over 256": 1.45, "prefill with one": 1.05, "first token of a cold adapter": 1.10,
}  # fmt: skip
EQUAL = 0.9
"""Share of tokens that captured and other steps must have in common: bfloat16 rounds differently in either."""
WRONG = 0.02
"""The largest error of a kernel, relative to the reference."""


class AdaptedRunner(TimedRunner):
    """Gives requests slots, past the scheduler.

    Attributes:
        slot_of: A request's slot, of its serial.
        loads: Adapters to put into slots with the next step.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.slot_of: Callable[[int], int] = lambda serial: -1
        self.loads: tuple[LoraLoad, ...] = ()

    def launch(self, planned: Step) -> LaunchedStep:
        planned.entries = tuple(
            msgspec.structs.replace(entry, lora_slot=self.slot_of(entry.serial)) for entry in planned.entries
        )
        planned.lora_loads, self.loads = self.loads, ()
        return super().launch(planned)


def write_adapter(folder: Path, modules: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """A random adapter for all of these modules, in PEFT's format."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in modules.items():
        a, b = (torch.randn(*shape, generator=draw) for shape in ((rank, columns), (rows, rank)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = (a / columns**0.5).bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = (0.3 * b / rank**0.5).bfloat16()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def kernel_error(runner: ModelRunner, slots: np.ndarray, gated: bool) -> float:
    """The largest error of the device's products on the layers of the first decoder layer, relative to plain torch in float32."""
    loras = runner.loras
    assert loras is not None
    ranks, products, worst = loras._slots._ranks, loras._slots.products, 0.0
    plain = TorchLora(ranks, runner.ops.gated, runner.ops.device)
    for site in (site for site in loras._sites if site.layer == 0):
        place = site.place
        wide = LoraPlace(
            [each.float() for each in place.memory[: slots.max() + 1]], place.offset, place.parts, place.columns
        )
        x = torch.randn(len(slots), place.columns, device=runner.ops.device, dtype=torch.bfloat16)
        out = torch.randn(len(slots), sum(place.parts), device=runner.ops.device, dtype=torch.bfloat16)
        loras._slots.await_all()
        loras._slots.begin(slots)
        plain.begin(slots)
        wanted = plain.add(wide, plain.shrink(wide, x.float()), out.float())
        if gated and len(place.parts) == 2 and len(set(place.parts)) == 1:
            gate, up = wanted.chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * up
            found = products.add_gated(place, products.shrink(place, x), out, "silu")
        else:
            found = products.add(place, products.shrink(place, x), out)
        worst = max(worst, float((found.float() - wanted).norm() / wanted.norm()))
    return worst


def tokens_of(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What requests generate, in their order."""
    engine.scheduler.flush_cache()
    first = engine.count + 1
    engine.add(prompts, [count] * len(prompts), GREEDY)
    found: dict[int, list[int]] = {}
    for outputs in engine.steps():
        for output in outputs:
            found.setdefault(output.serial, []).extend(output.token_ids)
    return [found[first + at] for at in range(len(prompts))]


def share_equal(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of tokens up to each request's first difference, which all later ones follow."""
    same = total = 0
    for a, b in zip(one, other, strict=True):
        differs = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same, total = same + differs, total + min(differs + 1, len(a))
    return same / total


class Bench:
    """Measures and prints. Args: variant: The model's name; where: the device and the commit; repeats: of each measurement, the
    quickest counts."""

    def __init__(self, variant: str, where: dict[str, str], repeats: int, steps: int) -> None:
        self._variant, self._where, self._repeats, self._steps = variant, where, repeats, steps
        self.ratios: dict[str, float] = {}
        self._base: dict[str, float] = {}

    def report(self, what: str, value: float, unit: str) -> None:
        row = {"what": f"{self._variant} {what}", "value": round(value, 4), "unit": unit, "engine": "sapwood"}
        print(json.dumps(row | self._where), flush=True)

    def decode(self, engine: Engine, batch: int) -> float:
        """Milliseconds of a step of so many requests."""
        found = []
        # The first requests are as many tokens ahead as all prompts take steps, which compute fewer tokens beside decodes.
        length = 24 + self._steps + 2 * batch * 1024 // STEP_TOKENS
        for _ in range(self._repeats):
            with engine.decoding(batch, length=length) as step:
                found.append(engine.time_steps(step, self._steps)["steady"])
        return min(found)

    def prefill(self, engine: Engine, length: int, before: Callable[[], None] = lambda: None) -> float:
        """Milliseconds until the first token of a prompt."""
        found = []
        for seed in range(self._repeats + 1):
            prompts = prompts_of(1, length, seed=seed)
            before()
            found.append(engine.generate(prompts, [1]) * 1000)
        return min(found[1:])

    def base(self, what: str, milliseconds: float) -> None:
        """Notes a figure of the model without the feature."""
        self._base[what] = milliseconds
        self.report(f"{what} base", milliseconds, "ms")

    def ratio(self, what: str, milliseconds: float, base: str) -> None:
        """Prints a figure, and as a ratio to one of the base."""
        self.ratios[what] = milliseconds / self._base[base]
        self.report(what, milliseconds, "ms")
        self.report(f"{what} ratio", self.ratios[what], "of base")

    def table(self) -> None:
        """Prints all ratios beside what they should be."""
        print(f"\n{'':44} ratio   goal")
        for what, ratio in self.ratios.items():
            print(f"{what:44} {ratio:5.3f}   {GOALS.get(what, float('nan')):5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with the model's config.json.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--registered", type=int, default=32, help="Adapters in slots beside base-only requests.")
    parser.add_argument(
        "--decodes", default="64:1,64:16,64:32,64:64,256:256", help="REQUESTS:ADAPTERS, joined by commas."
    )
    parser.add_argument("--prefill", type=int, default=8192, help="Tokens of a prompt.")
    parser.add_argument("--cold", type=int, default=1024, help="Tokens of a prompt whose adapter is not in a slot yet.")
    parser.add_argument("--kv-gb", type=float, default=44.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="Steps of a decode that are timed.")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--in-line", action="store_true", help="Run no shrink beside the layer's own product.")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    decodes = [tuple(map(int, each.split(":"))) for each in arguments.decodes.split(",")]
    batches = sorted({batch for batch, _ in decodes})
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    name = arguments.model.name + ("" if arguments.quantization == "none" else f"-{arguments.quantization}")
    bench = Bench(name, {"device": device, "commit": measured_commit()}, arguments.repeats, arguments.steps)
    most = max(batches)
    wanted: dict[str, Any] = {
        "max_running": most, "max_step_tokens": max(STEP_TOKENS, most), "kv_gb": arguments.kv_gb,
        "device": arguments.device, "quantization": arguments.quantization,
    }  # fmt: skip
    engine = Engine(arguments.model, **wanted)
    engine.generate(prompts_of(4, 700, seed=1), [8] * 4)
    for batch in batches:
        bench.base(f"decode {batch}", bench.decode(engine, batch))
    bench.base("prefill", bench.prefill(engine, arguments.prefill))
    engine.close()
    del engine
    gc.unfreeze()  # an engine has the collector spare what lived when it was made
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()

    if arguments.in_line:
        from sapwood_kernels.lora.cuda_slots import CudaLoraSlots

        CudaLoraSlots.beside = False
    engine = Engine(arguments.model, lora_slots=arguments.slots, lora_rank=arguments.rank, **wanted)
    inner = engine.runner._runner
    assert isinstance(inner, ModelRunner) and inner.loras is not None
    runner = engine.runner = AdaptedRunner(inner)
    bench.report("start-up with slots", engine.start_seconds, "s")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(READ):
            path = write_adapter(Path(folder) / str(number), inner.loras.modules, arguments.rank, number)
            facts = inner.read_lora(Lora(1 + number, f"adapter {number}", str(path)))
    bench.report("adapter", facts.bytes / 1e6, "MB")
    runner.loads = tuple(LoraLoad(slot, 1 + slot % READ) for slot in range(arguments.registered))
    engine.generate(prompts_of(4, 700, seed=1), [8] * 4)
    for batch in batches:
        bench.ratio(f"base with adapters in slots, decode {batch}", bench.decode(engine, batch), f"decode {batch}")
    bench.ratio("base with adapters in slots, prefill", bench.prefill(engine, arguments.prefill), "prefill")
    assert inner.loras.batch.applied == 0, "base requests were computed with adapters"

    runner.loads = tuple(LoraLoad(slot, 1 + slot % READ) for slot in range(arguments.slots))
    runner.slot_of = lambda serial: serial % arguments.slots
    engine.generate(prompts_of(4, 700, seed=1), [8] * 4)
    draw, held = np.random.default_rng(0), min(arguments.slots, 8)
    errors = [
        kernel_error(inner, draw.integers(-1, held, count), gated) for count in (1, 64, 300) for gated in (False, True)
    ]
    bench.report("error of kernels", max(errors), "of plain torch")
    prompts = prompts_of(min(16, most), 200, seed=9)
    runner.slot_of = lambda serial: serial % len(prompts) % arguments.slots
    engine.count = len(prompts) * -(-engine.count // len(prompts))  # so that requests have the same slots each time
    captured = tokens_of(engine, prompts, 8)
    kept, inner._graphs = inner._graphs, None
    engine.count = len(prompts) * -(-engine.count // len(prompts))
    launched = tokens_of(engine, prompts, 8)
    inner._graphs, runner.slot_of = kept, lambda serial: -1
    plain = tokens_of(engine, prompts, 8)
    bench.report("tokens of captured steps", share_equal(captured, launched), "equal to those of others")
    bench.report("tokens with adapters", share_equal(captured, plain), "equal to the base's")
    applied = inner.loras.batch.applied
    assert applied > 0, "no adapter was computed"
    for batch, adapters in decodes:
        if adapters > arguments.slots:
            continue
        runner.slot_of = lambda serial, count=adapters: serial % count
        bench.ratio(f"decode {batch} over {adapters}", bench.decode(engine, batch), f"decode {batch}")
    runner.slot_of = lambda serial: 0
    bench.ratio("prefill with one", bench.prefill(engine, arguments.prefill), "prefill")
    bench.base("first token of a warm adapter", bench.prefill(engine, arguments.cold))

    def evict() -> None:
        runner.loads = (LoraLoad(0, 1 + len(loaded) % READ),)
        loaded.append(0)

    loaded: list[int] = []
    bench.ratio(
        "first token of a cold adapter", bench.prefill(engine, arguments.cold, evict), "first token of a warm adapter"
    )
    bench.report("rows times layers with adapters", inner.loras.batch.applied - applied, "computed")
    bench.table()
    engine.close()
    wrong = max(errors) > WRONG or share_equal(captured, launched) < EQUAL
    print("WRONG" if wrong else "right", flush=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    leave(main)
