"""On the GPU: a tiny model's GGUF file in every type that the package writes, whose layers keep its numbers in groups, against
the same file widened: prompts, a row alone and four at once. In float32 as near as sums, in bfloat16 as near as its rounding.

    python benchmarks/gpu/checks/check_stored.py [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from check_correctness import models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commit import measured_commit

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.models.gguf_files import write_gguf
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "token_embd", "output")
NEAR = {"float32": 2e-4, "bfloat16": 0.06}
GREEDY = SamplingParams(temperature=0.0)


def logits(runner: ModelRunner, count: int) -> torch.Tensor:
    """Of a prompt of 100 tokens and of the token after it, for so many requests at once: [count * 101, vocabulary]."""
    prompts = [[3 + (i * 7 + each * 31) % 900 for i in range(101)] for each in range(count)]
    table = np.arange(8 * count, dtype=np.int32).reshape(count, 8)
    parts = [Part(row, prompt[:100], 0, True, GREEDY) for row, prompt in enumerate(prompts)]
    first = runner.logits(step_for(runner.info, 0, table, parts))
    parts = [Part(row, prompt[100:], 100, True, GREEDY, enters=False) for row, prompt in enumerate(prompts)]
    return torch.cat((first, runner.logits(step_for(runner.info, 1, table, parts)))).float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it.")
    device = parser.parse_args().device
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
            file = write_gguf(
                Path(folder) / f"{kind}.gguf", models()["llama"], "llama", kinds=dict.fromkeys(MATRICES, kind)
            )
            for dtype, near in NEAR.items():
                made = {
                    "model_path": file, "device": device, "dtype": dtype, "num_pages": 64, "max_running": 8,
                    "max_step_tokens": 512,
                }  # fmt: skip
                kept, wide = (build_runner(RunnerOptions(**made, stored_weights=how)) for how in ("keep", "widen"))
                for count in (1, 4):
                    got, wanted = logits(kept, count), logits(wide, count)
                    error = float((got - wanted).norm() / wanted.norm())
                    wrong |= not error < near
                    line = {"what": f"GGUF {kind}", "dtype": dtype, "requests": count, "error": error, "near": near}
                    print(json.dumps(line | {"device": name, "commit": measured_commit()}), flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
