"""On the GPU: tiny random models equal transformers, in float32 (torch attention) and bfloat16 (FlashInfer, CUDA graphs).

Float8 (cache, linear layers) is checked against the same roundings in float32 on the CPU, which the unit tests define. With
--cut-demo FILE, made by cut_demo.py, real weights too: greedy tokens in float32 equal the CPU's, and what float8 costs there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler, SchedulerConfig
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import LaunchedStep, ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Step

SHAPE = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 2048, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def models() -> dict[str, transformers.PreTrainedModel]:
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, initializer_range=0.1))
    qwen = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, initializer_range=0.1))
    gemma = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SHAPE, initializer_range=0.1, sliding_window=32, query_pre_attn_scalar=128)
    )
    return {"llama": llama, "qwen3": qwen, "gemma3": gemma}


def request(runner: ModelRunner, tokens: list[int], start: int, samples: bool = True) -> Step:
    part = Part(0, tokens, start, samples, SamplingParams(temperature=0.0))
    return step_for(runner.info, 0, np.arange(64, dtype=np.int32).reshape(1, 64), [part])


def mixed_error(runner: ModelRunner, model: transformers.PreTrainedModel, tokens: list[int]) -> float:
    """Relative error of a step in which one request decodes while another's prompt goes in."""
    other = tokens[::-1]
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    greedy = SamplingParams(temperature=0.0)
    runner.execute(step_for(runner.info, 0, table, [Part(0, tokens[:-1], 0, False, greedy)]))
    parts = [
        Part(0, tokens[-1:], len(tokens) - 1, True, greedy),
        Part(1, other, 0, True, greedy),
    ]
    logits = runner.logits(step_for(runner.info, 1, table, parts))
    with torch.inference_mode():
        both = model(torch.tensor([tokens, other], device="cuda")).logits
    expected = torch.cat((both[0, -1:], both[1]))
    return float((logits - expected).norm() / expected.norm())


def check_overlap(runner: ModelRunner) -> bool:
    """Whether the overlapped loop gives the very tokens of the normal one, whatever requests ask for."""
    settings = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(temperature=1.0, top_k=40, min_p=0.01, presence_penalty=0.7, frequency_penalty=0.2, seed=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={5: 2.0}, prompt_logprobs=1),
    ]
    answers = []
    info = runner.info
    scheduler = Scheduler(
        SchedulerConfig(
            windows=info.windows,
            page_size=info.page_size,
            num_pages=info.num_pages,
            context_length=info.context_length,
            max_running=8,
        )
    )
    for overlap in (False, True):
        scheduler.flush_cache()
        for serial in range(8):
            params = msgspec.structs.replace(settings[serial % 4], max_tokens=40, ignore_eos=True)
            scheduler.add(Request(serial, str(serial), [3 + serial * 7 + i % 50 for i in range(30)], params))
        launched: deque[LaunchedStep] = deque()
        tokens: dict[int, list[object]] = {}
        while scheduler.has_work:
            planned = scheduler.schedule()
            if planned:
                launched.append(runner.launch(planned))
            while len(launched) > (1 if planned and overlap else 0):
                for each in scheduler.update(launched.popleft().result()):
                    tokens.setdefault(each.serial, []).append((each.token_ids, each.logprobs, each.prompt_logprobs))
        answers.append(tokens)
    return answers[0] == answers[1] and all(len(each) == 40 for each in answers[0].values())


# Name -> options, and the largest relative error of logits against the same options in float32 on the CPU. Random
# weights make much of a number that bfloat16 rounds to another float8.
FLOAT8: dict[str, tuple[dict[str, Any], float]] = {
    "fp8-kv": ({"kv_cache_dtype": "fp8_e4m3"}, 0.15),
    "fp8": ({"quantization": "fp8"}, 0.25),
    "fp8_block": ({"quantization": "fp8_block"}, 0.25),
    "fp8_tensor": ({"quantization": "fp8_tensor"}, 0.3),
    "fp8+fp8-kv": ({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, 0.25),
}


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu() - wanted.cpu()).norm() / wanted.norm())


def check_float8(name: str, model: transformers.PreTrainedModel) -> bool:
    """Whether each float8 option gives what its definition gives, in prefill, chunked prefill, one-row and few-row decoding."""
    good = True
    prompt = torch.randint(3, 1000, (100,)).tolist()
    with torch.inference_mode():
        whole = model.to("cpu", torch.float32).eval()(torch.tensor([prompt])).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for variant, (options, limit) in FLOAT8.items():
            made = {"model_path": Path(folder), "num_pages": 64, "max_running": 8, "max_step_tokens": 128, **options}
            oracle = build_runner(RunnerOptions(**made))
            wanted = oracle.logits(request(oracle, prompt, 0))
            runner = build_runner(RunnerOptions(**made, device="cuda", dtype="bfloat16"))
            got = torch.cat(
                (runner.logits(request(runner, prompt[:60], 0)), runner.logits(request(runner, prompt[60:], 60)))
            )
            error = relative(got, wanted)
            table = np.arange(64, dtype=np.int32).reshape(4, 16)
            greedy = SamplingParams(temperature=0.0)
            agreed = 0
            for count in (1, 4):  # a row alone has a kernel of its own
                parts = [Part(i, prompt[:-1], 0, False, greedy) for i in range(count)]
                runner.execute(step_for(runner.info, 0, table, parts))
                parts = [Part(i, prompt[-1:], 99, True, greedy) for i in range(count)]
                for (token,) in runner.execute(step_for(runner.info, 1, table, parts)).token_ids:
                    gap = float(wanted[-1].max() - wanted[-1, token])
                    agreed += gap < 2 * limit * float(wanted[-1].std())
            ok = error < limit and agreed == 5 and check_overlap(runner)
            good &= ok
            row = {"what": f"check {name} {variant}", "logits relative error to its definition": round(error, 6)}
            row |= {"to float32": round(relative(wanted, whole), 6), "greedy agreed": agreed, "of": 5, "ok": ok}
            print(json.dumps(row), flush=True)
    return good


def check_demo(path: Path) -> bool:
    """Whether greedy tokens of a real model in float32 equal the CPU's; also what float8 costs there."""
    made: dict[str, Any] = {"model_path": path, "num_pages": 64, "max_running": 4, "dtype": "float32"}
    runners = [build_runner(RunnerOptions(**made, device=device)) for device in ("cpu", "cuda")]
    texts: list[list[list[int]]] = []
    prompts = [[2, 818, 1279, 529, 301], [2, *range(700, 740)], [2, 1000, 90, 3000, 41, 41, 500]]
    for runner in runners:
        texts.append([])
        for prompt in prompts:
            tokens = list(prompt)
            for i in range(40):
                part = request(runner, tokens if i == 0 else tokens[-1:], 0 if i == 0 else len(tokens) - 1)
                tokens += runner.execute(part).token_ids[0]
            texts[-1].append(tokens)
    tokens = torch.randint(3, 4000, (500,)).tolist()
    logits = [runner.logits(request(runner, tokens, 0)).cpu() for runner in runners]
    error = relative(logits[1], logits[0])
    good = texts[0] == texts[1] and error < 1e-3
    row = {
        "what": "check cut demo float32",
        "logits relative error to the CPU": error,
        "texts equal": texts[0] == texts[1],
    }
    print(json.dumps(row | {"ok": good}), flush=True)
    plain = logits[1].log_softmax(-1)
    for variant, (options, _) in FLOAT8.items():
        got = (
            build_runner(RunnerOptions(**made, device="cuda", **options))
            .logits(request(runners[1], tokens, 0))
            .cpu()
            .log_softmax(-1)
        )
        divergence = float((plain.exp() * (plain - got)).sum(-1).mean())
        same = float((plain.argmax(-1) == got.argmax(-1)).float().mean())
        row = {
            "what": f"cut demo {variant}",
            "mean KL to float32": round(divergence, 6),
            "same likeliest token": round(same, 4),
        }
        print(json.dumps(row), flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut-demo", type=Path, help="The cut demo model.")
    arguments = parser.parse_args()
    worst = 0
    if arguments.cut_demo is not None:
        worst |= not check_demo(arguments.cut_demo)
    worst |= not check_float8("qwen3", models()["qwen3"])
    for name, model in models().items():
        for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.06)):
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                runner = build_runner(
                    RunnerOptions(
                        model_path=Path(folder), device="cuda", dtype=dtype, num_pages=64, max_running=8, max_step_tokens=128
                    )
                )  # fmt: skip
            reference = model.to("cuda", torch.float32).eval()
            prompt = torch.randint(3, 1000, (100,)).tolist()

            with torch.inference_mode():
                expected = reference(torch.tensor([prompt], device="cuda")).logits[0]
            first = runner.logits(request(runner, prompt[:60], 0))
            second = runner.logits(request(runner, prompt[60:], 60))
            error = ((torch.cat((first, second)) - expected).norm() / expected.norm()).item()
            tokens, agreed = list(prompt), 0
            runner.execute(request(runner, prompt[:-1], 0, samples=False))
            for _ in range(40):
                ((token,),) = runner.execute(request(runner, tokens[-1:], len(tokens) - 1)).token_ids
                with torch.inference_mode():
                    logits = reference(torch.tensor([tokens], device="cuda")).logits[0, -1]
                best = int(logits.argmax())
                gap = float(logits[best] - logits[token])
                agreed += token == best or gap < 2 * limit * float(logits.std())
                tokens.append(best)
            error = max(error, mixed_error(runner, reference, tokens))
            overlapped = check_overlap(runner)
            good = error < limit and agreed == 40 and overlapped
            worst |= not good
            row = {
                "what": f"check {name} {dtype}",
                "logits relative error": round(error, 6),
                "greedy agreed": agreed,
                "overlapped": overlapped,
            }
            print(json.dumps(row | {"of": 40, "ok": good}), flush=True)
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
