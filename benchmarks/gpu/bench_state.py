"""Models whose layers keep states, on one GPU: decodes, a long prompt, their least time, and where the time goes.

Random weights of the true shape, experts chosen evenly. The least time is that of the bytes that a step must move (weights of the
experts that are met, states read and written, keys and values), or of its products. Prints one JSON object a line.

    python benchmarks/gpu/bench_state.py --model benchmarks/gpu/configs/nemotron-h-8b
    python benchmarks/gpu/bench_state.py --model benchmarks/gpu/configs/lfm2-8b-a1b --no-graphs --batches 1,64 --prefill 0
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_engine import Bench, Engine, prompts_of, since_process_start
from commit import measured_commit
from ranks import Split, leave
from sparse_shape import BYTES_A_SECOND, PRODUCTS_A_SECOND
from step_profile import record

from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.loader import read_config
from sapwood_worker.model.runner.model_runner import ModelRunner

STEP_TOKENS = 8192
PROMPT = 256
"""Tokens of a prompt before decodes: a state has one size whatever came before."""
LAST = 60000
"""The last token of prompts: all these models have it."""
STEPS = 40
SHOWN = 12
"""Kernels that a profile names."""
TINY = {
    "hidden_size": 128, "intermediate_size": 128, "shared_intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 16,
    "shared_expert_intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_n_heads": 4,
    "mamba_num_heads": 4, "mamba_d_head": 64, "n_groups": 2, "num_hidden_layers": 8, "vocab_size": 100000,
}  # fmt: skip
"""Settings of a tiny model; each configuration gets those that it has."""


class Floor:
    """The least time of a model's steps.

    Args:
        model: The model.
        float8: Whether matrices of layers have one byte for a number, not two.
    """

    def __init__(self, model: DecoderModel, *, float8: bool) -> None:
        self._config, self._float8 = model.config, float8
        self._experts = self._others = self._head = 0
        table = 0
        for name, slot in model.weights().items():
            count, matrix = slot.target.numel(), slot.target.dim() > 1
            if "embed_tokens" in name:
                table += 2 * count
            elif "lm_head" in name:
                self._head += 2 * count
            elif ".experts." in name:
                self._experts += count * (1 if float8 else 2)
            else:
                self._others += count * (1 if float8 and matrix else 2 if matrix else 4)
        self._head = self._head or table  # tied
        self.state_bytes = 4 * sum(each.numbers for each in self._config.states if each is not None)
        attending = sum(map(self._config.attends, range(self._config.num_layers)))
        self._key_bytes = attending * 2 * 2 * self._config.num_kv_heads * self._config.head_dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights but an embedding's."""
        return self._experts + self._others + self._head

    def _met(self, tokens: int) -> float:
        """Part of the experts that so many tokens go to, where all are equally likely."""
        if (sparse := self._config.sparse) is None:
            return 1.0
        chosen, experts = sparse.routing.chosen, sparse.routing.experts
        return float(1 - (1 - chosen / experts) ** tokens)

    def decode_seconds(self, batch: int) -> float:
        """Of a step of so many requests."""
        moved: float = self._experts * self._met(batch) + self._others + self._head
        moved += batch * (2 * self.state_bytes + PROMPT * self._key_bytes)
        return moved / BYTES_A_SECOND

    def prefill_seconds(self, tokens: int) -> float:
        """Of a prompt, without what its tokens give each other."""
        bytes_of_number = 1 if self._float8 else 2
        numbers: float = self._others / bytes_of_number
        if (sparse := self._config.sparse) is not None:
            numbers += self._experts / bytes_of_number * sparse.routing.chosen / sparse.routing.experts
        products: float = 2 * tokens * numbers / (PRODUCTS_A_SECOND * (2 if self._float8 else 1))
        read = (self._experts * self._met(tokens) + self._others + self._head) / BYTES_A_SECOND
        return max(products, read)


def tiny(model: Path, folder: Path) -> Path:
    """Writes a configuration like a model's, with small sizes."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config |= {name: value for name, value in TINY.items() if name in config}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    if "hybrid_override_pattern" in config:
        config["hybrid_override_pattern"] = config["hybrid_override_pattern"][: config["num_hidden_layers"]]
    (folder / model.name).mkdir()
    (folder / model.name / "config.json").write_text(json.dumps(config))
    return folder / model.name


def measure(
    bench: Bench, engine: Engine, floor: Floor, batches: list[int], prefill: int, profiled: int, steps: int
) -> None:
    """Prints the figures.

    Args:
        bench: Prints.
        engine: Computes.
        floor: The least times.
        batches: Requests of decodes.
        prefill: Tokens of a prompt; 0: none is measured.
        profiled: The batch whose kernels are shown; 0: none.
        steps: Decodes that are timed.
    """
    for batch in batches:
        with engine.decoding(batch, length=30 + steps, prompt=PROMPT) as step:
            for part, milliseconds in engine.time_steps(step, steps).items():
                bench.report(f"decode {batch} {part}", milliseconds, "ms")
                if part == "steady":
                    least = floor.decode_seconds(batch) * 1000
                    bench.report(f"decode {batch} floor", least, "ms")
                    bench.report(f"decode {batch} over floor", milliseconds / least, "times")
            if batch == profiled:
                show(bench, f"decode {batch}", lambda step=step: [step() for _ in range(5)], 5)
    if prefill:
        prefill = min(prefill, engine.runner.info.context_length - 2)
        prompts = prompts_of(1, prefill, seed=1, last=LAST)
        engine.generate(prompts, [1])
        seconds = min(engine.generate(prompts, [1]) for _ in range(3))
        least = floor.prefill_seconds(prefill)
        bench.report(f"prefill 1x{prefill}", seconds * 1000, "ms")
        bench.report(f"prefill 1x{prefill} floor", least * 1000, "ms")
        bench.report(f"prefill 1x{prefill} over floor", seconds / least, "times")
        if profiled:
            show(bench, f"prefill 1x{prefill}", lambda: engine.generate(prompts, [1]), 1)


def show(bench: Bench, what: str, run: Any, steps: int) -> None:
    """Prints the device's time by part, and its longest kernels."""
    parts, kernels = record(run)
    for part, microseconds in parts.items():
        bench.report(f"{what} profile: {part}", microseconds / steps, "us")
    for kernel, microseconds in list(kernels.items())[:SHOWN]:
        print(f"#   {microseconds / steps:9.1f} us {kernel[:120]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--batches", default="1,8,64,256", help="Of decodes (default: %(default)s).")
    parser.add_argument("--prefill", type=int, default=8192, help="Tokens of a prompt; 0: none (default: 8192).")
    parser.add_argument(
        "--profiled", type=int, default=64, help="Batch whose kernels are shown; 0: none (default: 64)."
    )
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none", help="Of the linear layers.")
    parser.add_argument("--no-graphs", action="store_true", help="Launches every kernel by itself.")
    parser.add_argument("--attention-backend", default="triton", help="As the worker takes it (default: triton).")
    parser.add_argument("--kv-gb", type=float, default=60.0, help="Pages and states in GiB (default: 60).")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny model, to try it.")
    arguments = parser.parse_args()
    on_gpu, batches = arguments.device == "cuda", sorted(map(int, arguments.batches.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model if on_gpu else tiny(arguments.model, Path(folder))
        sparse = read_config(model)[1].sparse is not None
        engine = Engine(
            model, max_running=max(batches), max_step_tokens=STEP_TOKENS if on_gpu else 256,
            kv_gb=arguments.kv_gb if on_gpu else 0.2,
            attention_backend=arguments.attention_backend if on_gpu else "auto", quantization=arguments.quantization,
            cuda_graphs=not arguments.no_graphs, device=arguments.device,
            split=Split(uniform_tokens=STEP_TOKENS if sparse and on_gpu else 0, graph_sizes=tuple(batches)),
        )  # fmt: skip
    runner = engine.runner._runner
    assert isinstance(runner, ModelRunner) and isinstance(runner._model, DecoderModel)
    assert not on_gpu or arguments.no_graphs or runner._graphs is not None, "decodes are not captured"
    named = {arguments.quantization: arguments.quantization != "none", "no-graphs": arguments.no_graphs}
    variant = "+".join((arguments.model.name, *(name for name, unusual in named.items() if unusual)))
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    bench = Bench(engine, variant, {"device": device, "commit": measured_commit()}, None)
    floor = Floor(runner._model, float8=arguments.quantization != "none")
    bench.report("weights", floor.weight_bytes / 1e9, "GB")
    bench.report("state of a request", floor.state_bytes / 1e6, "MB")
    engine.generate(prompts_of(2, 40, seed=1, last=LAST), [4] * 2)
    bench.report("start-up to first token", since_process_start(), "s")
    profiled = arguments.profiled if on_gpu else 0
    measure(
        bench,
        engine,
        floor,
        batches,
        arguments.prefill if on_gpu else min(arguments.prefill, 64),
        profiled,
        STEPS if on_gpu else 1,
    )
    bench.report("whole run", since_process_start(), "s")
    engine.close()


if __name__ == "__main__":
    leave(main)
