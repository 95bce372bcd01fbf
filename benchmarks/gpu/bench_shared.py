"""Shared experts beside the others, on a stream of their own, or after them: decodes of a model of DeepSeek-V2-Lite's shape with
fewer layers, built both ways in one process and timed in turns on one GPU. One JSON object a line.

    python benchmarks/gpu/bench_shared.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from bench_engine import STEP_TOKENS, Engine
from commit import measured_commit
from ranks import Split
from sparse_shape import CONFIGS

from sapwood_worker.model.layers.sparse import sparse_mlp


def built(folder: Path, beside: int, batches: tuple[int, ...], device: str) -> Engine:
    """An engine whose shared experts are computed beside the others in steps of up to so many tokens."""
    sparse_mlp.MOST_BESIDE = beside
    split = Split(graph_sizes=batches)
    if device == "cuda":
        from sapwood_kernels.ops.cuda import CudaOps  # it needs Triton

        kept, split = CudaOps.router, replace(split, uniform_tokens=STEP_TOKENS)
    kv_gb, backend = (8.0, "triton") if device == "cuda" else (0.2, "auto")
    engine = Engine(folder, 256, STEP_TOKENS, kv_gb, split=split, device=device, attention_backend=backend)
    if device == "cuda":
        CudaOps.router = kept  # type: ignore[method-assign]
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="Of the model (default: 10).")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256", help="Requests (default: %(default)s).")
    parser.add_argument("--rounds", type=int, default=3, help="Of both; the best of each counts (default: 3).")
    parser.add_argument("--small", action="store_true", help="A narrow model.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it.")
    given = parser.parse_args()
    config = json.loads((CONFIGS / "deepseek-v2-lite/config.json").read_text()) | {"num_hidden_layers": given.layers}
    if given.small:
        config |= {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64}
    where = {"device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu", "commit": measured_commit()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        batches = tuple(map(int, given.batches.split(",")))
        engines = {beside: built(Path(folder), beside, batches, given.device) for beside in (0, 256)}
        for batch in batches:
            best = dict.fromkeys(engines, float("inf"))
            for _ in range(given.rounds):
                for beside, engine in engines.items():
                    with engine.decoding(batch, length=100) as step:
                        best[beside] = min(best[beside], engine.time_steps(step, 30)["steady"])
            found = {"after_ms": best[0], "beside_ms": best[256], "ratio": best[256] / best[0]}
            print(json.dumps({"what": f"shared experts, decode {batch}"} | found | where), flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
