"""Whether a draft's tokens, computed in one step, get the logits that they get one by one: random weights, prompts and tokens.

Prints a JSON object for each batch: by how much the logits differ, in parts of their standard deviation; the share of positions
whose likeliest token is the same; and of the others the largest gap between the two tokens, by the logits one by one.
A gap of no more than twice the difference is a tie that rounding breaks; exit code 1 says that there is a wider one.

    python benchmarks/gpu/checks/check_drafts.py --model benchmarks/gpu/configs/llama-3.1-8b
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.graphs.decode_rows import decode_rows
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Entry, Step


def step_of(tokens: np.ndarray, start: int, page_size: int, samples: int) -> Step:
    """The tokens [B, N] of B requests, at positions ``start`` and up, with pages that are the request's own."""
    count, length = tokens.shape
    full = np.full(count, length, np.int64)
    step = Step(0, np.arange(count), full * 0 + start, full, full * 0 + samples, tokens.ravel())
    each = 4096 // page_size
    step.pages = (np.arange(count)[:, None] * each + np.arange(-(-(start + length) // page_size))).astype(np.int32)
    return step


def logits(runner: ModelRunner, step: Step) -> Tensor:
    """float32 [T, vocab_size], through a decode graph where there is one for so many rows."""
    graphs, size = runner._graphs, runner.info.page_size
    rows = None if graphs is None else decode_rows(step, size, graphs.largest, graphs.most_pages)
    if rows is None:
        return runner.logits(step)
    with torch.inference_mode():
        return graphs.run(rows).logits.float().clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    parser.add_argument("--attention-backend", default="auto", help="triton needs no compiler of FlashInfer's")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--cases", default="1x256x8,16x256x4,16x2048x4", help="REQUESTSxPROMPTxDRAFT [default: %(default)s]"
    )
    arguments = parser.parse_args()
    runner = build_runner(
        RunnerOptions(
            model_path=arguments.model, load_format="dummy", device=arguments.device,
            attention_backend=arguments.attention_backend, dtype=arguments.dtype,
            context_length=4096, max_running=64, max_step_tokens=4096, num_pages=16 * 256 + 1,
        )
    )  # fmt: skip
    chance, size, wrong = np.random.default_rng(0), runner.info.page_size, False
    for batch, prompt, drafted in (map(int, each.split("x")) for each in arguments.cases.split(",")):
        tokens = chance.integers(10, runner.info.vocab_size, (batch, prompt + drafted))
        for row in range(batch):
            runner.execute(_prompt_of(tokens, row, prompt, size))
        single = torch.stack(
            [logits(runner, step_of(tokens[:, [at]], at, size, 1)) for at in range(prompt, prompt + drafted)], 1
        ).flatten(0, 1)
        together = logits(runner, step_of(tokens[:, prompt:], prompt, size, drafted))
        difference = float((single - together).abs().max())
        first, second = single.argmax(-1), together.argmax(-1)
        parted = first != second
        gaps = single.gather(1, first[:, None]) - single.gather(1, second[:, None])
        widest = float(gaps.max())
        fault = widest > 2 * difference or difference > 0.5 * float(single.std())
        wrong = wrong or fault
        row = {
            "what": f"draft rows {arguments.model.name} {arguments.dtype} {batch}x{prompt}x{drafted}",
            "largest_difference": round(difference / float(single.std()), 5),
            "typical_difference": round(float((single - together).std() / single.std()), 5),
            "same_token": round(1 - float(parted.float().mean()), 4),
            "widest_gap_of_others": round(widest / float(single.std()), 5),
            "median_gap": round(
                float((single.topk(2).values @ single.new_tensor([1.0, -1.0])).median() / single.std()), 5
            ),
            "fault": fault,
        }
        print(json.dumps(row), flush=True)
    raise SystemExit(int(wrong))


def _prompt_of(tokens: np.ndarray, row: int, prompt: int, page_size: int) -> Step:
    """One request's prompt, in its own row."""
    step = step_of(tokens[:, :prompt], 0, page_size, 1)
    only = slice(row, row + 1)
    return Step(
        0, step.rows[only], step.starts[only], step.counts[only], step.samples[only], tokens[row, :prompt],
        step.pages[only], (Entry(row, row, SamplingParams(temperature=0.0), 0),),
    )  # fmt: skip


if __name__ == "__main__":
    main()
