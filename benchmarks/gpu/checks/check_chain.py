"""Whether a head's drafts that graphs chain (``decode_chain.py``) are what the same steps say one by one: dummy weights.

Prints a JSON object; exit code 1 if a token of thirty is another, or if nothing was chained on a GPU. 40 s on an H200.

    python benchmarks/gpu/checks/check_chain.py --model benchmarks/gpu/configs/llama-3.1-8b --layers 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench_speculation import Engine
from walking_weights import eagle_head, untied, walk

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.model.runner.builder import build_headed_runner
from sapwood_worker.model.runner.drafting_runner import DraftingRunner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions

MOST = 7


def drafts(runner: ModelRunner, *, chains: bool) -> tuple[list[list[int]], int]:
    """All drafts of twelve requests, of 1 to 7 tokens, and how many steps were chained."""
    assert runner.draft is not None
    engine = Engine(runner, "prefix", 32, DraftModel(runner.draft, 4096, 2048, "eagle", 1))
    engine.scheduler.flush_cache()
    speculation: Any = engine.scheduler._speculation
    drafter = speculation._drafter
    if not chains:
        drafter._chain = lambda parts, step: False
    fill, said = drafter.fill, []

    def plan(decodes: Sequence[Request]) -> list[list[int]]:
        if any(request.unknown for request in decodes):
            speculation.waits = True
            return []
        wanted = []
        for request in decodes:
            speculation._draft(request, MOST, 0.0, 0.0)
            wanted.append([-1] * speculation._room(request, 1 + (request.serial + request.generated) % MOST))
        found: list[list[int]] = fill(decodes, wanted)
        speculation.late, speculation._late = (
            drafter.late,
            (len(decodes), max(map(len, found), default=0), drafter.caught_up),
        )
        said.extend(found)  # lately tokens these lists are filled when their check is over
        return found

    speculation.plan = plan
    prompts = [[10 + 37 * at + place for place in range(60 + 5 * at)] for at in range(12)]
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    return said, drafter.chained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a Llama's config.json.")
    parser.add_argument("--layers", type=int, help="Keep so many [default: all]")
    parser.add_argument("--attention-backend", default="auto", help="triton needs no compiler of FlashInfer's")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    folder = Path(tempfile.mkdtemp()) / "cut"
    folder.mkdir()
    config |= {"num_hidden_layers": arguments.layers or config["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config))
    walk()
    model = untied(folder)
    options = RunnerOptions(
        model_path=model, load_format="dummy", device=arguments.device,
        attention_backend=arguments.attention_backend, context_length=4096, max_running=32,
        max_step_tokens=2048, kv_cache_bytes=2**30 if arguments.device == "cuda" else 2**26,
    )  # fmt: skip
    times = [time.perf_counter()]
    runner = build_headed_runner(options, eagle_head(model))
    times.append(time.perf_counter())
    single, _ = drafts(runner, chains=False)
    times.append(time.perf_counter())
    together, chained = drafts(runner, chains=True)
    times.append(time.perf_counter())
    pairs = [pair for one, other in zip(single, together, strict=False) for pair in zip(one, other, strict=False)]
    same = sum(one == other for one, other in pairs)
    fault = same < len(pairs) * 29 / 30 or (arguments.device == "cuda" and not chained)
    row = {"what": "chained drafts", "chained_steps": chained, "tokens": len(pairs), "same": same, "fault": fault}
    assert isinstance(runner.draft, DraftingRunner)
    row |= {"begun_behind_checks": runner.draft.ahead}
    row["seconds"] = dict(
        zip(("build", "single", "chained"), (b - a for a, b in itertools.pairwise(times)), strict=True)
    )
    print(json.dumps(row), flush=True)
    return int(fault)


if __name__ == "__main__":
    sys.exit(main())
