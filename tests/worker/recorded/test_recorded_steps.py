"""What the scheduler plans for a fixed set of requests, and what each step launches, are what was recorded.

A refactoring leaves both as they are. Who changes them on purpose records them with ``SAPWOOD_RECORD=1`` and reads the diff.
A step whose launches equal an earlier step's names that step.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_kernels.native.products import processor
from sapwood_testing.worker.launch_recorder import LaunchRecorder, recorded_library
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import Step

FOLDER = Path(__file__).parent / "steps"
PROMPT = [3 + (7 * at) % 90 for at in range(60)]
REPEATED = [5, 6, 7, 8] * 8


def generating(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | settings))


def all_kinds() -> Iterator[list[Request]]:
    """Requests in rounds: a round comes when the one before it has been answered."""
    yield [Request(0, "one prompt", PROMPT[:20], generating())]
    yield [Request(1, "a prompt in chunks", PROMPT, generating())]
    yield [
        Request(2, "its prefix is cached", PROMPT[:50], generating()),
        Request(3, "beside it", PROMPT[9:20], generating()),
    ]
    yield [
        Request(4, "sampled", PROMPT[:5], generating(temperature=0.8, seed=1)),
        Request(5, "of the likeliest", PROMPT[5:9], generating(temperature=0.8, top_p=0.9, top_k=7, seed=2)),
        Request(6, "penalised", PROMPT[9:13], generating(frequency_penalty=0.5, presence_penalty=0.5)),
        Request(7, "with log probabilities", PROMPT[13:17], generating(logprobs=2)),
    ]
    yield [Request(8, "prompt's log probabilities", PROMPT[30:40], generating(prompt_logprobs=1))]


def drafted() -> Iterator[list[Request]]:
    yield [Request(0, "drafted", REPEATED, generating(max_tokens=12))]
    yield [Request(1, "from what is cached", REPEATED, generating(max_tokens=8))]
    yield [Request(at, "drafted in a batch", REPEATED, generating(max_tokens=8, seed=at)) for at in (2, 3)]


def shown(step: Step) -> str:
    """A step as text: of each part its row, where it starts, its tokens, and the sampled among them."""
    parts = zip(step.rows, step.starts, step.counts, step.samples, strict=True)
    copies = "" if step.copies is None else ", copies"
    return (
        "; ".join(f"row {row}: {start} + {count}, samples {samples}" for row, start, count, samples in parts) + copies
    )


def record(scheduler: Scheduler, runner: ModelRunner, rounds: Iterator[list[Request]], native: list[str]) -> str:
    """All steps and launches of the rounds, as text."""
    lines: list[str] = []
    seen: dict[tuple[str, ...], int] = {}
    recorder = LaunchRecorder(native)
    recorder.take()  # what loading launched
    for requests in rounds:
        lines.append(f"== {', '.join(request.request_id for request in requests)}")
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            step = scheduler.schedule()
            with recorder:
                output = runner.execute(step)
            launches = tuple(recorder.take())
            first = seen.setdefault(launches, step.number)
            lines.append(f"step {step.number}: {shown(step)}")
            lines += [f"    as step {first}"] if first != step.number else [f"    {line}" for line in launches]
            scheduler.update(output)
    return "\n".join(lines) + "\n"


def check(name: str, found: str) -> None:
    file = FOLDER / f"{name}.txt"
    if os.environ.get("SAPWOOD_RECORD"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(found)
    wanted = file.read_text()
    changes = difflib.unified_diff(wanted.splitlines(), found.splitlines(), "recorded", "now", lineterm="", n=2)
    assert found == wanted, "\n".join(list(changes)[:60])


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="recorded with torch 2.13: others launch otherwise"
)
@pytest.mark.parametrize(
    ("name", "model", "dtype", "rounds", "settings"),
    [
        ("dense", "qwen3", "bfloat16", all_kinds, {}),
        ("dense-native", "qwen3", "float32", all_kinds, {}),
        ("windows", "gemma3", "bfloat16", all_kinds, {}),
        pytest.param(
            *("experts", "qwen3-moe", "bfloat16", all_kinds, {}),
            marks=pytest.mark.skipif(processor() != "AVX512", reason="recorded on AVX-512: others multiply otherwise"),
        ),
        ("latent", "deepseek-v3", "bfloat16", all_kinds, {}),
        ("drafts", "qwen3", "bfloat16", drafted, {"speculate": "prefix"}),
    ],
)
def test_steps_and_launches_are_those_recorded(
    tiny_model: Any,
    make_runner: Any,
    name: str,
    model: str,
    dtype: str,
    rounds: Callable[[], Iterator[list[Request]]],
    settings: dict[str, Any],
) -> None:
    with recorded_library() as native:
        runner = make_runner(
            tiny_model(model).path, page_size=8, dtype=dtype, max_running=6, shared_prefix_attention=False
        )
    scheduler = scheduler_for(runner.info, max_step_tokens=24, **settings)
    check(name, record(scheduler, runner, rounds(), native))
