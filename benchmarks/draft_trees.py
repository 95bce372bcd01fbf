"""What trees of drafts would bring compared with chains of as many tokens, on texts of the demo model: tokens a step, of no step
run.

    python benchmarks/draft_trees.py

- ``prefix``: the chain is the prefix drafter's. Its guess, the latest places where the request's last two tokens stood before,
  and all that the prefix cache has after its tokens are branches of a tree, of which the likeliest nodes are taken. ``oracle``
  knows the best branch.
- ``model``: the model with noise on its weights drafts. How often the model's token is the drafter's first, second, ... choice
  gives every tree's worth: a node is right if all choices on its way are. The best tree of N nodes compared with a chain of N.

Prints a JSON object a line.
"""

from __future__ import annotations

import argparse
import heapq
import json
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_speculation import Engine
from dialled_drafts import edit_prompt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import packaged_path
from sapwood_worker.core.scheduler.speculation.ngram_drafter import LENGTH, MOST_PLACES, CopyingRow
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Step

QUESTIONS = (
    "Explain in a few sentences why the sky is blue during the day and red in the evening.",
    "Write a Python function that reads a CSV file and returns the sum of a column.",
    "List the planets of the solar system with one sentence about each.",
)
SIZES = (4, 8, 16, 31)
FADES = 0.85
"""How much less likely a node is than the one before it."""
Text = tuple[list[int], list[int]]
"""A prompt and its answer."""


def branches(drafted: list[int], known: list[int], cached: Sequence[list[int]]) -> list[list[int]]:
    """What may follow, the likeliest first."""
    found = [text[len(known) :][: SIZES[-1]] for text in reversed(cached) if text[: len(known)] == known]
    key = known[-LENGTH:]
    places = [end for end in range(len(known) - 1, LENGTH - 1, -1) if known[end - LENGTH : end] == key]
    return [each for each in (drafted, *found, *(known[end : end + SIZES[-1]] for end in places[:MOST_PLACES])) if each]


def after(known: array[int], cached: Sequence[list[int]]) -> array[int]:
    """What the cache has after a request's tokens: the latest, in whole pages."""
    for text in reversed(cached):
        whole = text[: len(text) // 16 * 16]
        if len(whole) > len(known) and whole[: len(known)] == known.tolist():
            return array("I", whole[len(known) :])
    return array("I")


def tree(found: Sequence[Sequence[int]], size: int) -> set[tuple[int, ...]]:
    """The likeliest nodes, each as the way to it: an earlier branch weighs more."""
    weights: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for place, branch in enumerate(found):
        for depth, token in enumerate(branch):
            weights[tuple(branch[:depth])][token] += 0.6**place
    nodes: set[tuple[int, ...]] = set()
    open_: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while open_ and len(nodes) <= size:
        chance, way = heapq.heappop(open_)
        nodes.add(way)
        total = sum(weights[way].values())
        for token, weight in weights[way].items():
            heapq.heappush(open_, (chance * FADES * weight / total, (*way, token)))
    return nodes


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def prefix_tokens(texts: Sequence[Text], size: int) -> dict[str, float]:
    """Tokens a step of drafts of so many tokens."""
    found = {}
    for kind in ("chain", "tree", "oracle"):
        cached: list[list[int]] = []
        steps = tokens = 0
        for prompt, answer in texts:
            known = array("I", [*prompt, answer[0]])
            row = CopyingRow(known, partial(after, known, cached))
            while (at := len(known) - len(prompt)) < len(answer):
                row.follow()
                drafted, rest = row.propose(0, size), answer[at:]
                offers = [drafted] if kind == "chain" else branches(drafted, known.tolist(), cached)
                if kind == "tree":
                    nodes = tree(offers, size)
                    right = max(depth for depth in range(len(rest) + 1) if tuple(rest[:depth]) in nodes)
                else:
                    right = max((common(offer[:size], rest) for offer in offers), default=0)
                came = rest[: right + 1]
                known.extend(came)
                steps, tokens = steps + 1, tokens + len(came)
            cached.append(prompt + answer)
        found[kind] = round(tokens / steps, 3)
    return found


def logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]: after each token."""
    pages = np.arange(-(-len(tokens) // runner.info.page_size), dtype=np.int32)[None]
    ones = np.array([len(tokens)], np.int64)
    pages = np.tile(pages, 1 + len(runner.info.windows))
    step = Step(0, ones * 0, ones * 0, ones, ones, np.array(tokens, np.int64), pages)
    with torch.inference_mode():
        return runner.logits(step)


def ranks(runner: ModelRunner, texts: Sequence[Text], most: int = 4) -> Iterator[int]:
    """Which of the drafter's choices each token of the answers is; ``most``: a later one."""
    for prompt, answer in texts:
        choices = logits(runner, prompt + answer)[len(prompt) - 1 : -1].topk(most).indices.tolist()
        yield from (row.index(token) if token in row else most for row, token in zip(choices, answer, strict=True))


def best_tree(chances: Sequence[float], size: int) -> float:
    """Tokens a step of the tree of so many nodes that is worth most."""
    open_, worth = [(-chances[0], 0, 1.0)], 1.0
    for _ in range(size):
        chance, rank, before = heapq.heappop(open_)
        worth -= chance
        heapq.heappush(open_, (chance * chances[0], 0, -chance))
        if rank + 1 < len(chances):
            heapq.heappush(open_, (-before * chances[rank + 1], rank + 1, before))
    return worth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="Of each answer [default: %(default)s]")
    parser.add_argument("--asked", type=int, default=4, help="How often each question is asked [default: %(default)s]")
    parser.add_argument("--noise", default="0.05,0.1,0.2", help="[default: %(default)s]")
    arguments = parser.parse_args()
    from sapwood_tokenizer.vocab.loader import load_tokenizer  # not everywhere where this runs

    demo: Path = packaged_path("demo-base")
    options = RunnerOptions(
        model_path=demo,
        threads=1,
        context_length=2048,
        max_running=32,
        max_step_tokens=1024,
        kv_cache_bytes=2**29,
        stored_weights="widen",
    )
    runner = build_runner(options)
    encode = load_tokenizer(demo).tokenizer.encode
    asked = [list(encode(question).ids) for question in QUESTIONS for _ in range(arguments.asked)]
    edits = [edit_prompt(demo, number) for number in range(2)]
    texts: dict[str, list[Text]] = {}
    for name, prompts, temperature in (("copy", edits, 0.0), ("again", asked, 0.3), ("again", asked, 0.7)):
        sampling = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, ignore_eos=name == "copy")
        answers, _ = Engine(runner, "off", 32).generate(prompts, sampling)
        own = texts[f"{name} at {temperature}"] = [(prompt, answers[at]) for at, prompt in enumerate(prompts)]
        for size in SIZES:
            row = {"drafter": "prefix", "text": f"{name} at {temperature}", "tokens": size}
            print(json.dumps(row | prefix_tokens(own, size)), flush=True)
    before = {name: slot.target.clone() for name, slot in runner._model.weights().items()}
    for noise in map(float, arguments.noise.split(",")):
        torch.manual_seed(0)
        with torch.inference_mode():
            for name, slot in runner._model.weights().items():
                if before[name].dim() == 2 and before[name].is_floating_point():
                    slot.target.copy_(before[name] + noise * before[name].std() * torch.randn_like(before[name]))
        for text in ("copy at 0.0", "again at 0.3"):
            seen = np.bincount(list(ranks(runner, texts[text][:6])), minlength=5)
            chances = (seen[:4] / seen.sum()).tolist()
            for size in SIZES:
                chain = sum(chances[0] ** depth for depth in range(size + 1))
                row = {"drafter": f"model with noise {noise}", "text": text, "tokens": size}
                row |= {"chain": round(chain, 3), "tree": round(best_tree(chances, size), 3)}
                print(json.dumps(row | {"choices": [round(each, 3) for each in chances]}), flush=True)


if __name__ == "__main__":
    main()
