"""What float8 costs in accuracy, on a real model: perplexity, divergence and agreement beside the model in its own dtype.

The text is this project's documentation, which no model has seen. On a CPU the same roundings are computed in float32. Prints one
JSON object a line.

    python benchmarks/float8_accuracy.py --model demo --tokens 1500
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import resolve_model
from sapwood_testing.worker.steps import Part, step_for
from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fp8 KV cache": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8 linear": {"quantization": "fp8"},
    "fp8_block linear": {"quantization": "fp8_block"},
    "fp8_tensor linear": {"quantization": "fp8_tensor"},
    "fp8 linear and KV cache": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="As the worker takes it (default: demo).")
    parser.add_argument("--device", default="cpu", help="Default: cpu.")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs", help="A file or a folder.")
    parser.add_argument("--tokens", type=int, default=1500, help="Of the text, in pieces of 500 (default: 1500).")
    arguments = parser.parse_args()
    files = [arguments.text] if arguments.text.is_file() else sorted(arguments.text.glob("*.md"))
    tokenizer = load_tokenizer(resolve_tokenizer(arguments.model))
    pieces: list[list[int]] = []
    for file in files:
        ids = tokenizer.tokenizer.encode(file.read_text(), add_special_tokens=True).ids[:500]
        if len(pieces) * 500 < arguments.tokens:
            pieces.append(ids)
    plain: list[torch.Tensor] = []
    for name, options in VARIANTS.items():
        runner = build_runner(
            RunnerOptions(
                model_path=resolve_model(arguments.model),
                device=arguments.device,
                num_pages=64,
                max_running=2,
                **options,
            )
        )
        found = []
        for ids in pieces:
            part = Part(0, ids, 0, True, SamplingParams())
            table = np.arange(64, dtype=np.int32).reshape(2, 32)
            found.append(runner.logits(step_for(runner.info, 0, table, [part])).cpu().log_softmax(-1))
        plain = plain or found
        loss = [
            -each[:-1].gather(1, torch.tensor(ids)[1:, None]).mean() for each, ids in zip(found, pieces, strict=True)
        ]
        divergence = [(a.exp() * (a - b)).sum(-1).mean() for a, b in zip(plain, found, strict=True)]
        same = [(a.argmax(-1) == b.argmax(-1)).float().mean() for a, b in zip(plain, found, strict=True)]
        row = {
            "what": f"{arguments.model} {name}",
            "perplexity": round(float(torch.stack(loss).mean().exp()), 3),
            "mean KL to the model as it is": round(float(torch.stack(divergence).mean()), 5),
            "same likeliest token": round(float(torch.stack(same).mean()), 4),
        }
        print(json.dumps(row | {"tokens": sum(map(len, pieces)), "device": arguments.device}), flush=True)


if __name__ == "__main__":
    main()
