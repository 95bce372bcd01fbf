"""On several GPUs: tiny random models split over them answer as on one. Prints a line for each; exits 1 if one does not.

float32: the greedy tokens are equal. bfloat16 (CUDA graphs, NCCL in them): log probabilities of a prompt are as near to float32's
as one GPU's are, and tokens are those of one GPU up to where two were about as likely.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from check_correctness import models
from ranks import Options, group_runners

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler

REQUESTS, TOKENS = 12, 48
TIE = 4
"""Log probabilities nearer than so many times what bfloat16 on one GPU differs by from float32 are a tie."""


@dataclass
class Answer:
    """tokens; gaps: by how much each was likelier than the next; prompt: log probabilities of the prompt's tokens."""

    tokens: list[int]
    gaps: list[float]
    prompt: list[float]


def answers(runner: LoadedRunner) -> list[Answer]:
    """Greedy answers, with all requests in one batch."""
    info = runner.info
    scheduler = Scheduler(SchedulerConfig(
        windows=info.windows, page_size=info.page_size, num_pages=info.num_pages, context_length=info.context_length,
        max_running=REQUESTS, max_step_tokens=256,
    ))  # fmt: skip
    draw = np.random.default_rng(3)
    for serial in range(REQUESTS):
        prompt = array("I", draw.integers(3, 1000, 5 + 17 * serial).tolist())
        # Half of them want nothing but tokens: their decodes are replayed graphs.
        wanted = {"logprobs": 2, "prompt_logprobs": 0} if serial % 2 else {}
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, **wanted)
        scheduler.add(Request(serial, str(serial), prompt, sampling))
    found = [Answer([], [], []) for _ in range(REQUESTS)]
    while scheduler.has_work:
        for output in scheduler.update(runner.launch(scheduler.schedule()).result()):
            answer = found[output.serial]
            answer.tokens += output.token_ids
            answer.gaps += [each.top_logprobs[0] - each.top_logprobs[1] for each in output.logprobs]
            answer.prompt += [each.logprob for each in output.prompt_logprobs]
    return found


def distance(found: list[Answer], other: list[Answer]) -> float:
    """Root mean square difference of the prompts' log probabilities."""
    pairs = [
        (mine, theirs)
        for a, b in zip(found, other, strict=True)
        for mine, theirs in zip(a.prompt, b.prompt, strict=True)
    ]
    return float(np.sqrt(np.mean([(mine - theirs) ** 2 for mine, theirs in pairs])))


def largest_gap(found: list[Answer], other: list[Answer]) -> float:
    """By how much a token was likelier than the next where answers begin to differ, at most; 0 where none differs."""
    gaps = [0.0]
    for mine, theirs in zip(found, other, strict=True):
        for place, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
            if a != b:
                gaps += theirs.gaps[place : place + 1]
                break
    return max(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="2", help="GPUs to split over (default: 2); in stages of a pipeline: 2x2 for 2 of 2."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the check itself.")
    arguments = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, str]] = []
        options: list[Options] = []
        for name, model in models().items():
            path = Path(folder) / name
            model.save_pretrained(path)
            for dtype in ("float32", "bfloat16"):
                cases.append((name, dtype))
                options.append(
                    {
                        "model_path": path,
                        "dtype": dtype,
                        "num_pages": 512,
                        "max_running": REQUESTS,
                        "max_step_tokens": 256,
                    }
                )
        with group_runners(1, options, arguments.device) as runners:
            alone = dict(zip(cases, map(answers, runners), strict=True))
        for split_in in arguments.sizes.split(","):
            tensor, _, stages = split_in.partition("x")
            count = int(stages or 1)
            with group_runners(int(tensor) * count, options, arguments.device, count) as runners:
                for case, split in zip(cases, map(answers, runners), strict=True):
                    name, dtype = case
                    exact, one = alone[name, "float32"], alone[case]
                    if dtype == "float32":
                        fine = [each.tokens for each in split] == [each.tokens for each in one]
                        said = f"prompts differ by {distance(split, one):.2e}"
                    else:
                        mine, theirs = distance(split, exact), distance(one, exact)
                        gap = largest_gap(split, one)
                        fine = mine <= 1.5 * theirs and gap <= TIE * theirs
                        said = f"prompts differ from float32 by {mine:.2e}, on one GPU by {theirs:.2e}; tokens by {gap:.2e}"
                    wrong += not fine
                    print(f"{'ok' if fine else 'WRONG'}: {name} {dtype} on {split_in} GPUs: {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
