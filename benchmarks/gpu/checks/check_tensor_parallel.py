"""On several GPUs: tiny random models split over them answer as on one. Prints a line for each as it comes; exits 1
if one does not. On one GPU the models answer side by side, in a process each.

float32: the greedy tokens are equal. bfloat16 (CUDA graphs, NCCL in them): log probabilities of a prompt are as near to float32's
as one GPU's are, and tokens are those of one GPU up to where two were about as likely. Ways: every layer split (tp); of
DeepSeek-V3's layers, whole experts on each rank (ep), which may have requests of its own as well (dp), whose rows may go to the
ranks of their experts only (direct; in float8: direct-float8, of which only prompts are compared, as nothing else rounds so).
Stages of a pipeline (sizes such as 1x2 and 2x2) compute as many steps at once, of other requests each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from array import array
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from check_correctness import SHAPE, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ranks import Options, Split, group_runners, leave

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.group.group_runner import GroupRunner
from sapwood_worker.core.loaded_runner import LoadedRunner
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.rank_planner import RankPlanner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import LaunchedStep

REQUESTS, TOKENS = 12, 48
SPARSE = "deepseek-v3"
TIE = 4
"""Log probabilities nearer than so many times what bfloat16 on one GPU differs by from float32 are a tie."""

Case = tuple[str, str]
"""A model's name and its dtype."""

OWN = Split(whole_experts=True, own_requests=True)
WAYS = {
    "tp": Split(), "ep": Split(whole_experts=True), "dp": OWN, "direct": replace(OWN, dispatch="direct"),
    "direct-float8": replace(OWN, dispatch="direct-float8"),
}  # fmt: skip


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


@dataclass(frozen=True)
class Flags:
    """device, all_reduce, as_on_gpus: As on the command line."""

    device: str
    all_reduce: str
    as_on_gpus: bool


@dataclass
class Answer:
    """tokens; gaps: by how much each was likelier than the next; prompt: log probabilities of the prompt's tokens."""

    tokens: list[int]
    gaps: list[float]
    prompt: list[float]


def answers(runner: LoadedRunner) -> list[Answer]:
    """Greedy answers, with all requests in one batch, or in as many as there are stages."""
    info = runner.info
    config = SchedulerConfig(
        windows=info.windows, page_size=info.page_size, num_pages=info.num_pages, context_length=info.context_length,
        max_running=REQUESTS, max_step_tokens=256, chained=info.chained,
        micro_batches=info.micro_batches, micro_batches_from=info.micro_batches_from,
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
    launched: deque[LaunchedStep] = deque()
    while scheduler.has_work:
        planned = scheduler.schedule()
        if planned:
            launched.append(runner.launch(planned))
        if planned and scheduler.plans_ahead:
            continue
        for output in scheduler.update(launched.popleft().result()):
            answer = found[output.serial]
            answer.tokens += output.token_ids
            answer.gaps += [each.top_logprobs[0] - each.top_logprobs[1] for each in output.logprobs]
            answer.prompt += [each.logprob for each in output.prompt_logprobs]
    return found


def exchanged(runner: LoadedRunner) -> float:
    """Bytes that ranks have given each other for experts, as a part of those where all rows go to all ranks."""
    assert runner.experts is not None
    tokens = sum(map(sum, runner.experts()()))
    return runner.exchanged_bytes(tokens) / (tokens * runner.info.expert_exchange)


def under_way(runner: LoadedRunner) -> int:
    """Steps whose layers the first stage has launched before what followed the last stage of an earlier one."""
    assert isinstance(runner, GroupRunner)
    own = runner._runner
    assert isinstance(own, ModelRunner) and own.deferred is not None
    return own.deferred.overtaken


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


def verdict(case: Case, way: str, split: list[Answer], alone: dict[Case, list[Answer]]) -> tuple[bool, str]:
    """Whether ranks answer as one GPU does, and by how much they differ.

    Args:
        case: The model and the dtype.
        way: How they share it.
        split: Answers of the ranks.
        alone: Those of one GPU.
    """
    name, dtype = case
    exact, one = alone[name, "float32"], alone[case]
    if way == "direct-float8":
        mine, theirs = distance(split, exact), distance(alone[name, "bfloat16"], exact)
        said = f"prompts differ from float32 by {mine:.2e}, in bfloat16 on one GPU by {theirs:.2e}"
        return mine <= 1.5 * theirs, said
    if dtype == "float32":
        fine = [each.tokens for each in split] == [each.tokens for each in one]
        return fine, f"prompts differ by {distance(split, one):.2e}"
    mine, theirs = distance(split, exact), distance(one, exact)
    gap = largest_gap(split, one)
    fine = mine <= 1.5 * theirs and gap <= TIE * theirs
    return fine, f"prompts differ from float32 by {mine:.2e}, on one GPU by {theirs:.2e}; tokens by {gap:.2e}"


def alone_answers(given: dict[Case, Options], device: str, began: float) -> dict[Case, list[Answer]]:
    """Answers on one GPU, of all models at once: most of the time is that of compilers."""
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    workers = len(given) if device == "cuda" else 2
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        found = {
            pool.submit(answer_alone, options, device, number % gpus): case
            for number, (case, options) in enumerate(given.items())
        }
        for each in as_completed(found):
            say(began, f"{' '.join(found[each])} on one GPU: built in {each.result()[1]:.0f} s")
        return {case: each.result()[0] for each, case in found.items()}


def answer_alone(options: Options, device: str, gpu: int) -> tuple[list[Answer], float]:
    """Answers, and the seconds in which the model was built."""
    if device == "cuda":
        torch.cuda.set_device(gpu)
        device = f"cuda:{gpu}"
        # It compiles by itself, along with the others.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[3 * gpu :][:3])
    else:
        torch.set_num_threads(1)
    began = time.monotonic()
    runner = build_runner(RunnerOptions(device=device, **options))
    return answers(runner), time.monotonic() - began


def compare(
    answered: Connection, began: float, way: str, split_in: str, given: dict[Case, Options], flags: Flags
) -> int:
    """Compares ranks with one GPU; returns how many models answer otherwise.

    Args:
        answered: Brings the answers of one GPU; what is imported is imported before.
        began: When all of it began.
        way: How ranks share models.
        split_in: How many they are, as ``--sizes`` has it.
        given: The models.
        flags: The rest.
    """
    tensor, _, stages = split_in.partition("x")
    count, wrong = int(stages or 1), 0
    split = replace(WAYS[way], all_reduce=flags.all_reduce, as_on_gpus=flags.as_on_gpus)
    alone: dict[Case, list[Answer]] = answered.recv()
    with group_runners(int(tensor) * count, list(given.values()), flags.device, count, split) as runners:
        say(began, f"{split_in} ranks have met, {way}")
        for case, runner in zip(given, runners, strict=True):
            named = f"{' '.join(case)} on {split_in} GPUs, {way}"
            say(began, f"{named}: built; sums: {runner.info.all_reduce.words}")
            fine, said = verdict(case, way, answers(runner), alone)
            if count > 1:
                beside = under_way(runner)
                said += (
                    f"; {runner.info.micro_batches} steps at once, {beside} launched while an earlier one was under way"
                )
                fine = fine and runner.info.micro_batches == count and beside > TOKENS
            if "direct" in way and not (fewer := exchanged(runner)) < 1:
                fine, said = False, f"rows went to all ranks: {fewer:.2f} of their bytes"
            wrong += not fine
            print(f"{'ok' if fine else 'WRONG'}: {named}: {said}", flush=True)
    return wrong


def compare_and_leave(*arguments: Any) -> None:
    """The same, in a process of its own: one has one group in its life."""
    leave(lambda: compare(*arguments))


def say(began: float, what: str) -> None:
    print(f"# {time.monotonic() - began:.0f} s: {what}", flush=True)


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="2", help="GPUs to split over (default: 2); in stages of a pipeline: 2x2 for 2 of 2."
    )
    parser.add_argument("--ways", default="tp", help=f"Of {', '.join(WAYS)}, which (default: tp).")
    parser.add_argument("--models", default=f"llama,qwen3,gemma3,{SPARSE}", help="Which (default: %(default)s).")
    parser.add_argument("--all-reduce", default="auto", help="What sums, as the worker takes it (default: auto).")
    parser.add_argument(
        "--attention-backend",
        default="triton",
        help="For bfloat16 on GPUs (default: triton, which compiles in seconds; flashinfer takes minutes, auto takes it).",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the check itself.")
    parser.add_argument(
        "--as-on-gpus",
        action="store_true",
        help="CPUs decode by what stands for graphs, and as many steps are launched as on GPUs.",
    )
    arguments = parser.parse_args()
    ways, names = arguments.ways.split(","), arguments.models.split(",")
    wrong = 0
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}")
    flags = Flags(arguments.device, arguments.all_reduce, arguments.as_on_gpus)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given: dict[Case, Options] = {}
        for name in names:
            if not (set(ways) - {"tp"} if name == SPARSE else "tp" in ways):
                continue
            path = Path(folder) / name
            (sparse_model() if name == SPARSE else models()[name]).save_pretrained(path)
            for dtype in ("float32", "bfloat16"):
                sizes = {"num_pages": 512, "max_running": REQUESTS, "max_step_tokens": 256}
                given[name, dtype] = {"model_path": path, "dtype": dtype, "micro_batches": "always", **sizes}
                if arguments.device == "cuda" and dtype == "bfloat16":
                    given[name, dtype]["attention_backend"] = arguments.attention_backend
        say(began, f"{len(given)} models are made")
        groups = []
        for way in ways:
            wanted = {case: options for case, options in given.items() if (case[0] == SPARSE) == (way != "tp")}
            for split_in in arguments.sizes.split(","):
                here, there = context.Pipe()
                process = context.Process(target=compare_and_leave, args=(there, began, way, split_in, wanted, flags))
                process.start()
                groups.append((f"{split_in}, {way}", process, here))
        alone = alone_answers(given, arguments.device, began)
        for named, process, way_there in groups:
            way_there.send(alone)
            process.join()
            if process.exitcode:
                say(began, f"{named}: {process.exitcode} wrong, or it failed")
            wrong += process.exitcode or 0
    say(began, f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
