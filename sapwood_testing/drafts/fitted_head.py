"""A head of EAGLE-3 that was fitted to a tiny model's greedy answers, so that some of what it says is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.drafts.answers import run, tokens_of
from sapwood_testing.drafts.drafted import options, scheduler_of
from sapwood_testing.drafts.eagle_head import KNOWN, WIDTH, PlainHead, norm, random_tensors, write
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.runner.builder import build_runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[3 + at, *range(40, 40 + at)] for at in range(8)]
"""What it was fitted to the answers of."""


def greedy_ones(first: int = 0) -> list[Request]:
    """A request for each of the prompts, with serial numbers from ``first`` on."""
    return [Request(first + at, f"g{at}", prompt, GREEDY) for at, prompt in enumerate(PROMPTS)]


def fit(tiny: Any, folder: Path) -> Path:
    """Writes a random head with a fitted last matrix, for a tiny Llama; returns where it is."""
    tensors = random_tensors()
    head = PlainHead(tensors, tiny.oracle)
    states, wanted = [], []
    runner = build_runner(options(tiny.path))
    for serial, outputs in run(scheduler_of(runner), runner, False, greedy_ones()).items():
        text = [*PROMPTS[serial], *tokens_of(outputs)]
        states.append(norm(head.hidden(head.features(text[:-1]), text[1:]), tensors["norm.weight"])[:-1])
        wanted += text[2:]
    x, known = torch.cat(states), torch.arange(KNOWN) + tensors["d2t"]
    y = (torch.tensor(wanted)[:, None] == known).float()
    tensors["lm_head.weight"] = torch.linalg.solve(x.T @ x + 0.001 * torch.eye(WIDTH), x.T @ y).T.contiguous()
    return write(folder, tensors)
