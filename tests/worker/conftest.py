"""What the tests of models share: transformers as the oracle, and a driver that plays the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import packaged_path
from sapwood_testing.drafts.answers import VOCAB, VOCABULARY
from sapwood_testing.models.tiny_models import TINY, Tiny, make_tiny
from sapwood_testing.worker.fake_worker_process import FakeWorkerProcess
from sapwood_testing.worker.steps import Part, step_for
from sapwood_testing.worker.storage.mooncake_cluster import MooncakeCluster, mooncake_is_installed
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.step import Step


@dataclass
class Driver:
    """Plays the scheduler: gives requests pages in random order and runs chunks of their tokens.

    Everything it was told about a request it keeps: tokens, how many of them are cached, and its row of the page table.
    """

    runner: ModelRunner
    rows: int = 16
    step: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    entering: set[int] = field(default_factory=set)
    lora_slots: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        info = self.runner.info
        # Each page table names the same pages, so all of them must have these.
        count = min(info.num_pages, *(window.num_pages for window in info.windows), 2**31)
        pages = np.random.default_rng(7).permutation(count).astype(np.int32)
        self.table = pages[: count // self.rows * self.rows].reshape(self.rows, -1)

    def add(self, slot: int, tokens: list[int], output_tokens: int = 0, lora_slot: int = -1) -> None:
        """A new request in row ``slot``; the last ``output_tokens`` are output of before; its adapter is in ``lora_slot``."""
        self.lora_slots[slot] = lora_slot
        self.tokens[slot] = list(tokens)
        self.cached[slot] = 0
        self.prompts[slot] = len(tokens) - output_tokens
        self.entering.add(slot)

    def output(
        self, chunks: dict[int, int], sampling: dict[int, SamplingParams] | SamplingParams | None = None
    ) -> Step:
        """A step that computes the next ``chunks[slot]`` tokens of each slot and samples where none are left after."""
        requests = []
        for slot, size in chunks.items():
            start, tokens = self.cached[slot], self.tokens[slot]
            assert start + size <= len(tokens)
            chosen = sampling.get(slot) if isinstance(sampling, dict) else sampling
            requests.append(
                Part(
                    row=slot,
                    token_ids=tokens[start : start + size],
                    start=start,
                    samples=start + size == len(tokens),
                    sampling=chosen or SamplingParams(temperature=0.0),
                    enters=slot in self.entering,
                    history=array("I", tokens),
                    output_start=self.prompts[slot],
                    prompt_length=self.prompts[slot],
                    prompt_logprobs=(chosen or SamplingParams()).prompt_logprobs,
                    lora_slot=self.lora_slots.get(slot, -1),
                )
            )
            self.cached[slot] += size
        self.entering -= chunks.keys()
        self.step += 1
        return step_for(self.runner.info, self.step, self.table, requests)

    def execute(
        self, chunks: dict[int, int], sampling: dict[int, SamplingParams] | SamplingParams | None = None
    ) -> dict[int, int]:
        """Runs a step; appends and returns the sampled tokens by slot."""
        result = self.runner.execute(self.output(chunks, sampling))
        sampled = {slot: tokens[0] for slot, tokens in zip(chunks, result.token_ids, strict=True) if tokens}
        for slot, token in sampled.items():
            self.tokens[slot].append(token)
        return sampled

    def generate(
        self,
        prompts: dict[int, list[int]],
        count: int,
        sampling: dict[int, SamplingParams] | SamplingParams | None = None,
    ) -> dict[int, list[int]]:
        """Prefills all prompts in one step and decodes them together; the sampled tokens of each."""
        for slot, prompt in prompts.items():
            self.add(slot, prompt)
        self.execute({slot: len(prompt) for slot, prompt in prompts.items()}, sampling)
        for _ in range(count - 1):
            self.execute(dict.fromkeys(prompts, 1), sampling)
        return {slot: self.tokens[slot][len(prompt) :] for slot, prompt in prompts.items()}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """Builds a tiny random model by its name, saved the way transformers saves it; settings may differ from those in ``TINY``."""
    made: dict[str, Tiny] = {}

    def make(name: str, **others: Any) -> Tiny:
        key = f"{name}-{others}" if others else name
        if key not in made:
            made[key] = make_tiny(name, tmp_path_factory.mktemp(name), **others)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_names() -> list[str]:
    return list(TINY)


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., ModelRunner]:
    """A runner with a small pool: ``make_runner(path, page_size=16, ...)``."""

    def make(path: Path, **options: Any) -> ModelRunner:
        page_size = options.setdefault("page_size", 16)
        options.setdefault("num_pages", 16 * (-(-256 // page_size)))
        options.setdefault("max_running", 16)
        # Tiny matrices: more threads only wait for each other.
        options.setdefault("threads", 1)
        return build_runner(RunnerOptions(model_path=path, **options))

    return make


@pytest.fixture(scope="session")
def make_driver() -> Callable[[ModelRunner], Driver]:
    return Driver


@pytest.fixture(scope="session")
def demo_runner() -> ModelRunner:
    """The demo model, float32."""
    return build_runner(RunnerOptions(model_path=packaged_path("demo-base"), num_pages=1024, max_running=16, threads=1))


@pytest.fixture(scope="module")
def store() -> GrammarStore:
    """The grammars of :mod:`sapwood_testing.drafts.answers`."""
    return GrammarStore(VOCABULARY, VOCAB, (0,))


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[MooncakeCluster]:
    """A real Mooncake Store of the test's own."""
    if not mooncake_is_installed():
        pytest.skip("Mooncake is not installed")
    with MooncakeCluster(tmp_path, lend_bytes=256 << 20) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def fake_worker() -> Callable[..., FakeWorkerProcess]:
    """Starts a worker that the caller stops."""
    return FakeWorkerProcess


@pytest.fixture
def start() -> Iterator[Callable[..., FakeWorkerProcess]]:
    """Starts workers that are killed after the test."""
    running: list[FakeWorkerProcess] = []

    def start_one(*flags: str, step_ms: float = 1) -> FakeWorkerProcess:
        running.append(FakeWorkerProcess(*flags, step_ms=step_ms))
        return running[-1]

    yield start_one
    for worker in running:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture(scope="module")
def lend() -> Iterator[Callable[..., FakeWorkerProcess]]:
    """Gives workers to tests that leave them as they found them, caches aside: of one file, those with the same flags are one."""
    lent: dict[tuple[Any, ...], FakeWorkerProcess] = {}

    def lend_one(*flags: str, step_ms: float = 1) -> FakeWorkerProcess:
        if (*flags, step_ms) not in lent:
            lent[*flags, step_ms] = FakeWorkerProcess(*flags, step_ms=step_ms)
        return lent[*flags, step_ms]

    yield lend_one
    for worker in lent.values():
        worker.process.kill()
        worker.process.wait()
