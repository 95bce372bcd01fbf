"""Runs a model with dummy weights through all kinds of steps, so that all kernels that it needs are compiled.

``sapwood kernels build`` starts it in a process whose caches are empty folders, as ``python -m sapwood_worker.model.rehearsal``
with the worker's configuration as JSON on standard input.
"""

from __future__ import annotations

import sys

import numpy as np

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_common.telemetry.logs import setup_logging
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.runner.factory import make_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.step import Entry, Step

_SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=50),
    SamplingParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1, frequency_penalty=0.1),
    SamplingParams(temperature=0.0, logprobs=5),
)
"""Each a request's; a step of all of them, and steps of the first few, are what sampling is compiled for."""
_PROMPT = 40


def rehearse(runner: ModelRunner) -> int:
    """Computes prompts, decodes, and both at once; returns how many steps."""
    info = runner.info
    count = min(len(_SETTINGS), info.max_running)
    pages = -(-(_PROMPT + 4) // info.page_size)
    table = np.arange(count * pages, dtype=np.int32).reshape(count, pages)
    tables = np.tile(table, (1, 1 + len(info.windows)))
    number = 0

    def run(rows: list[int], starts: list[int], counts: list[int], *, enter: bool) -> None:
        nonlocal number
        tokens = np.arange(sum(counts), dtype=np.int64) % 50 + 3
        entries = tuple(
            Entry(row, row + 1, _SETTINGS[row], tokens=np.arange(_PROMPT, dtype=np.uint32).tobytes())
            for row in rows * enter
        )
        chosen = np.array(rows, np.int64)
        ones = np.ones(len(rows), np.int64)
        runner.execute(
            Step(
                number, chosen, np.array(starts, np.int64), np.array(counts, np.int64), ones, tokens, tables[chosen], entries
            )
        )  # fmt: skip
        number += 1

    for row in range(count):
        run([row], [0], [_PROMPT], enter=True)
        run([row], [_PROMPT], [1], enter=False)
    every = list(range(count))
    run(every, [_PROMPT + 1] * count, [1] * count, enter=False)
    run(every, [_PROMPT + 2] * (count - 1) + [0], [1] * (count - 1) + [_PROMPT], enter=False)
    return number


def main() -> None:
    """Prints how many steps were run; exits 2 if the configuration cannot be served."""
    setup_logging("rehearsal", "info", "text")
    config = WorkerConfig.model_validate_json(sys.stdin.read())
    try:
        runner = make_runner(config)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if isinstance(runner, ModelRunner) and runner.info.generates:
        print(f"{rehearse(runner)} steps", flush=True)


if __name__ == "__main__":
    main()
