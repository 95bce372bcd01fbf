"""On one GPU: tokens from the second tier are those of the first tier, and those of computing it again.

    python benchmarks/gpu/checks/check_tiers.py --model benchmarks/gpu/configs/qwen3-0.6b

1. bf16, FlashInfer, CUDA graphs, steps overlapped: prompts answered from the first tier, then, the device's pages wiped, from
   the second. Both compute the same chunks from the same KV, so tokens and log probabilities must be equal to the bit.
2. float32: a few documents asked about again and again over a pool that holds a fifth of them, under each write policy,
   compared with a run without a second tier.

Prints one JSON object a line; exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions

Answers = dict[int, list[tuple[int, float]]]


class Bench:
    def __init__(self, model: Path, dtype: Any) -> None:
        self.runner = build_runner(
            RunnerOptions(
                model_path=model, load_format="dummy", device="cuda", dtype=dtype, context_length=2048,
                num_pages=400, max_running=8, host_cache_ratio=2.0,
            )
        )  # fmt: skip
        self.serial = 0

    def begin(self, pages: int, policy: Any, *, tiered: bool = True) -> None:
        assert self.runner.host_pool is not None
        info = self.runner.info
        host = HostPages(self.runner.host_pool.num_pages)
        self.tiers = HierarchicalCache(host, pages, info.page_size, policy) if tiered else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                windows=info.windows,
                page_size=info.page_size, num_pages=pages, context_length=info.context_length, max_running=8,
                max_step_tokens=1024, prefix_cache=tiered, conservativeness=0.0,
            ),
            self.tiers,
        )  # fmt: skip

    def answer(self, prompts: list[list[int]], length: int) -> list[list[tuple[int, float]]]:
        first = self.serial
        found: Answers = {}
        for prompt in prompts:
            sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0)
            self.scheduler.add(Request(self.serial, str(self.serial), prompt, sampling))
            self.serial += 1
        launched: deque[Any] = deque()
        while self.scheduler.has_work or self.scheduler.has_copies or launched:
            planned = self.scheduler.schedule()
            if planned:
                launched.append(self.runner.launch(planned))
            while len(launched) > (1 if planned else 0):
                for output in self.scheduler.update(launched.popleft().result()):
                    assert not output.error, output.error
                    pairs = zip(output.token_ids, output.logprobs, strict=True)
                    found.setdefault(output.serial, []).extend((token, each.logprob) for token, each in pairs)
        self.scheduler.check()
        return [found[first + index] for index in range(len(prompts))]

    def wipe(self) -> None:
        for pages in self.runner._pool.pages.values():
            pages.fill_(float("nan"))
        torch.cuda.synchronize()


def documents(count: int, length: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randint(10, 99_999) for _ in range(length)] for _ in range(count)]


def bits(bench: Bench) -> bool:
    prompts = documents(6, 705)  # a token more than whole pages: all else comes from either tier
    bench.begin(400, "write_through")
    computed = bench.answer(prompts, 32)
    device = bench.answer(prompts, 32)
    assert bench.tiers is not None
    bench.scheduler.clear_device()
    bench.wipe()
    before = bench.tiers.counters.host_hits
    host = bench.answer(prompts, 32)
    row = {
        "what": "bf16: second tier equals first tier, tokens and log probabilities",
        "value": host == device,
        "pages loaded": bench.tiers.counters.host_hits - before,
        "same tokens as computed": sum(
            [t for t, _ in a] == [t for t, _ in b] for a, b in zip(host, computed, strict=True)
        ),
        "of": len(prompts),
    }
    print(json.dumps(row), flush=True)
    return host == device and row["pages loaded"] == 6 * 43


def policies(bench: Bench) -> bool:
    chance = random.Random(9)
    asked = [
        document[: chance.randint(150, 320)] + [chance.randint(10, 99_999) for _ in range(3)]
        for document in documents(20, 320) * 3
    ]
    chance.shuffle(asked)
    bench.begin(400, "write_through", tiered=False)
    expected = [[token for token, _ in each] for each in bench.answer(asked, 12)]
    good = True
    for policy in ("write_through", "write_through_selective", "write_back"):
        bench.begin(90, policy)
        got = [[token for token, _ in each] for each in bench.answer(asked, 12)]
        same = sum(a == b for a, b in zip(got, expected, strict=True))
        assert bench.tiers is not None
        counters = bench.tiers.counters
        row = {"what": f"float32, {policy}: same answers as without tiers", "value": same, "of": len(asked)}
        row |= {"host hits": counters.host_hits, "stored": counters.stored, "fences": counters.fences}
        print(json.dumps(row), flush=True)
        good &= same == len(asked) and counters.host_hits > 50
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory; its config.json is enough")
    arguments = parser.parse_args()
    good = True
    for dtype, part in (("bfloat16", bits), ("float32", policies)):
        try:
            good &= part(Bench(arguments.model, dtype))
        except Exception:
            good = False
            print(json.dumps({"what": part.__name__, "error": traceback.format_exc()[-2500:]}), flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
