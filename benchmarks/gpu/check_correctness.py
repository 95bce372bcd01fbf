"""On the GPU: tiny random models equal transformers, in float32 (torch attention) and bfloat16 (FlashInfer, CUDA graphs)."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import torch
import transformers

from sapwood_worker.runner.launched_step import LaunchedStep
from sapwood_worker.runner.model_runner import ModelRunner, RunnerOptions
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.output import ScheduledRequest, SchedulerOutput
from sapwood_worker.scheduler.request import Request
from sapwood_worker.scheduler.scheduler import Scheduler, SchedulerConfig

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


def request(tokens: list[int], start: int, samples: bool = True) -> SchedulerOutput:
    part = ScheduledRequest("r", 0, tokens, start, samples, SamplingParams(temperature=0.0))
    return SchedulerOutput(0, np.arange(64, dtype=np.int32).reshape(1, 64), [part])


def mixed_error(runner: ModelRunner, model: transformers.PreTrainedModel, tokens: list[int]) -> float:
    """Relative error of a step in which one request decodes while another's prompt goes in."""
    other = tokens[::-1]
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    greedy = SamplingParams(temperature=0.0)
    runner.execute(SchedulerOutput(0, table, [ScheduledRequest("a", 0, tokens[:-1], 0, False, greedy)]))
    parts = [
        ScheduledRequest("a", 0, tokens[-1:], len(tokens) - 1, True, greedy),
        ScheduledRequest("b", 1, other, 0, True, greedy),
    ]
    logits = runner.logits(SchedulerOutput(1, table, parts))
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
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias=((5, 2.0),), prompt_logprobs=1),
    ]
    answers = []
    info = runner.info
    scheduler = Scheduler(
        SchedulerConfig(
            page_size=info.page_size, num_pages=info.num_pages, context_length=info.context_length, max_running=8
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


def main() -> int:
    worst = 0
    for name, model in models().items():
        for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.06)):
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                runner = ModelRunner(
                    RunnerOptions(model_path=Path(folder), device="cuda", dtype=dtype, num_pages=64, max_running=8)
                )  # fmt: skip
            reference = model.to("cuda", torch.float32).eval()
            prompt = torch.randint(3, 1000, (100,)).tolist()

            with torch.inference_mode():
                expected = reference(torch.tensor([prompt], device="cuda")).logits[0]
            first = runner.logits(request(prompt[:60], 0))
            second = runner.logits(request(prompt[60:], 60))
            error = ((torch.cat((first, second)) - expected).norm() / expected.norm()).item()
            tokens, agreed = list(prompt), 0
            runner.execute(request(prompt[:-1], 0, samples=False))
            for _ in range(40):
                (token,) = runner.execute(request(tokens[-1:], len(tokens) - 1)).token_ids
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
