"""On several GPUs: tiny random models split over them answer as on one. Prints a line for each; exits 1 if one does not.

float32: the greedy tokens are equal. bfloat16 (CUDA graphs, NCCL in them): log probabilities of a prompt are as near to float32's
as one GPU's are, and tokens are those of one GPU up to where two were about as likely. Ways: every layer split (tp); of
DeepSeek-V3's layers, whole experts on each rank (ep), which may have requests of its own as well (dp).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from check_correctness import SHAPE, models
from ranks import Options, Split, group_runners

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.ranks.planner import RankPlanner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler

REQUESTS, TOKENS = 12, 48
SPARSE = "deepseek-v3"
TIE = 4
"""Log probabilities nearer than so many times what bfloat16 on one GPU differs by from float32 are a tie."""

WAYS = {"tp": Split(), "ep": Split(whole_experts=True), "dp": Split(whole_experts=True, own_requests=True)}


def sparse_model() -> transformers.PreTrainedModel:
    """DeepSeek-V3's layers."""
    torch.manual_seed(1)
    sizes = {
        "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "q_lora_rank": 128, "first_k_dense_replace": 1, "moe_intermediate_size": 128, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    kept = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    config = transformers.DeepseekV3Config(**kept | sizes, initializer_range=0.1)
    return transformers.DeepseekV3ForCausalLM(config)


@dataclass
class Answer:
    """tokens; gaps: by how much each was likelier than the next; prompt: log probabilities of the prompt's tokens."""

    tokens: list[int]
    gaps: list[float]
    prompt: list[float]


def answers(runner: LoadedRunner) -> list[Answer]:
    """Greedy answers, with all requests in one batch."""
    info = runner.info
    config = SchedulerConfig(
        windows=info.windows, page_size=info.page_size, num_pages=info.num_pages, context_length=info.context_length,
        max_running=REQUESTS, max_step_tokens=256,
    )  # fmt: skip
    schedulers = [Scheduler(config) for _ in range(info.attention_ranks)]
    scheduler = schedulers[0] if len(schedulers) == 1 else RankPlanner(config, schedulers)
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


def verdict(case: tuple[str, str], split: list[Answer], alone: dict[tuple[str, str], list[Answer]]) -> tuple[bool, str]:
    """Whether ranks answer as one GPU does, and by how much they differ.

    Args:
        case: The model and the dtype.
        split: Answers of the ranks.
        alone: Those of one GPU.
    """
    name, dtype = case
    exact, one = alone[name, "float32"], alone[case]
    if dtype == "float32":
        fine = [each.tokens for each in split] == [each.tokens for each in one]
        return fine, f"prompts differ by {distance(split, one):.2e}"
    mine, theirs = distance(split, exact), distance(one, exact)
    gap = largest_gap(split, one)
    fine = mine <= 1.5 * theirs and gap <= TIE * theirs
    return fine, f"prompts differ from float32 by {mine:.2e}, on one GPU by {theirs:.2e}; tokens by {gap:.2e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="2", help="GPUs to split over (default: 2); in stages of a pipeline: 2x2 for 2 of 2."
    )
    parser.add_argument("--ways", default="tp", help="Of tp, ep and dp, which (default: tp).")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the check itself.")
    arguments = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        cases: list[tuple[str, str]] = []
        options: list[Options] = []
        for name, model in {**models(), SPARSE: sparse_model()}.items():
            path = Path(folder) / name
            model.save_pretrained(path)
            for dtype in ("float32", "bfloat16"):
                cases.append((name, dtype))
                sizes = {"num_pages": 512, "max_running": REQUESTS, "max_step_tokens": 256}
                options.append({"model_path": path, "dtype": dtype, **sizes})
        given = dict(zip(cases, options, strict=True))
        with group_runners(1, options, arguments.device) as runners:
            alone = dict(zip(cases, map(answers, runners), strict=True))
        for way in arguments.ways.split(","):
            wanted = [case for case in cases if (case[0] == SPARSE) == (way != "tp")]
            for split_in in arguments.sizes.split(","):
                tensor, _, stages = split_in.partition("x")
                count = int(stages or 1)
                with group_runners(
                    int(tensor) * count, [given[case] for case in wanted], arguments.device, count, WAYS[way]
                ) as runners:
                    for case, split in zip(wanted, map(answers, runners), strict=True):
                        fine, said = verdict(case, split, alone)
                        wrong += not fine
                        print(
                            f"{'ok' if fine else 'WRONG'}: {' '.join(case)} on {split_in} GPUs, {way}: {said}",
                            flush=True,
                        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
