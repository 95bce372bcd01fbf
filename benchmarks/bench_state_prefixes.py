"""Prefix hits of models that keep a state: many turns of agents, in the worker's own scheduler and cache, without a model.

20 conversations of 10 turns share a system prompt. Each turn's prompt is the conversation so far, with 15 % of text of its own
inserted, and what the model has answered. The rule of vLLM's ``align`` mode is simulated beside it: one state a request, at the
last border of a block before the end of its prompt, in blocks so large that a page is as large as a state, and prefixes end where
such a block has both.

    python benchmarks/bench_state_prefixes.py
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.records.kv_layout import StateSlots
from sapwood_worker.records.load import Load
from sapwood_worker.records.step import ModelOutput

TALKS, TURNS, SYSTEM, PROMPT, ANSWER = 20, 10, 1200, 260, 90
OWN = 0.15
"""The share of a turn's prompt that is text of its own, inserted before the end."""
_VOCAB = 100_000


def conversations(seed: int = 0) -> list[list[list[int]]]:
    """For each turn the prompts' new tokens, one list for each conversation: what comes after the answer before."""
    chance = random.Random(seed)
    shared = [chance.choices(range(_VOCAB), k=PROMPT) for _ in range(TURNS)]
    turns = []
    for turn in shared:
        cut = int(len(turn) * (1 - OWN))
        turns.append([[*turn[:cut], *chance.choices(range(_VOCAB), k=len(turn) - cut)] for _ in range(TALKS)])
    return turns


def ours(page_size: int, snapshots: int, num_pages: int, at_once: int, seed: int = 0) -> Load:
    """Runs the conversations turn by turn through a scheduler; returns its last load.

    Args:
        page_size: Tokens in a page.
        snapshots: Slots for snapshots.
        num_pages: Pages of the pool.
        at_once: Most requests that run at once.
        seed: Of the texts.
    """
    config = SchedulerConfig(
        page_size=page_size,
        num_pages=num_pages,
        context_length=1 << 15,
        max_running=at_once,
        max_step_tokens=2048,
        states=StateSlots(snapshots),
    )
    scheduler = Scheduler(config)
    chance = random.Random(seed + 1)
    talks = [chance.choices(range(_VOCAB), k=SYSTEM)] * TALKS
    for turn, added in enumerate(conversations(seed)):
        talks = [[*talk, *new] for talk, new in zip(talks, added, strict=True)]
        for which, talk in enumerate(talks):
            sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
            scheduler.add(Request(turn * TALKS + which, f"{turn}-{which}", talk, sampling))
        answers: dict[int, list[int]] = {}
        while scheduler.has_work:
            step = scheduler.schedule()
            tokens = [[chance.randrange(_VOCAB)] if samples else [] for samples in step.samples.tolist()]
            for output in scheduler.update(ModelOutput(step.number, tokens)):
                answers.setdefault(output.serial, []).extend(output.token_ids)
        talks = [[*talk, *answers[turn * TALKS + which]] for which, talk in enumerate(talks)]
    return scheduler.load()


def aligned(block: int, seed: int = 0) -> tuple[int, int]:
    """The same conversations with one state a request at the last border of a block: tokens of cached prefixes, and hits.

    Nothing is ever evicted, and pages of 16 tokens are what a model without states would find.
    """
    chance = random.Random(seed + 1)
    talks = [chance.choices(range(_VOCAB), k=SYSTEM)] * TALKS
    pages: set[tuple[int, ...]] = set()
    states: set[tuple[int, ...]] = set()
    found = hits = 0
    for added in conversations(seed):
        talks = [[*talk, *new] for talk, new in zip(talks, added, strict=True)]
        for which, talk in enumerate(talks):
            found += _longest(talk, 16, pages)
            hits += _longest(talk, block, states)
            talks[which] = [*talk, *chance.choices(range(_VOCAB), k=ANSWER)]
            pages.update(tuple(talks[which][:end]) for end in range(16, len(talks[which]), 16))
            if border := (len(talk) - 1) // block * block:
                states.add(tuple(talk[:border]))
    return found, hits


def _longest(tokens: Sequence[int], step: int, known: set[tuple[int, ...]]) -> int:
    """The longest prefix, in whole steps and short of the last token, that is known."""
    for end in range((len(tokens) - 1) // step * step, 0, -step):
        if tuple(tokens[:end]) in known:
            return end
    return 0


def main() -> None:
    """Prints a line of JSON for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--snapshots", type=int, nargs="*", default=[16, 64, 256])
    arguments = parser.parse_args()
    for snapshots in arguments.snapshots:
        for page_size in (1, 16):
            load = ours(page_size, snapshots, (1 << 18) // page_size, at_once=8)
            pages, states = load.prefix_page_tokens, load.prefix_state_tokens
            result = {"rule": "ours", "page_size": page_size, "snapshots": snapshots, "of_pages": states / pages}
            print(json.dumps({**result, "of_prompts": states / load.prompt_tokens, "evicted": load.evicted_states}))
    for block in (16, 528, 1056, 2048):
        pages, states = aligned(block)
        print(
            json.dumps({"rule": "one state a request, at a block's border", "block": block, "of_pages": states / pages})
        )


if __name__ == "__main__":
    main()
