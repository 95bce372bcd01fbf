"""The model of the fake worker: its configuration and its runner."""

from __future__ import annotations

import logging
import time

import numpy as np
from pydantic import Field

from sapwood_common.errors import ConfigError
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.pools.host_pool import HostPool, SharedMemory, host_pool_pages, pool_bytes
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.ranks import ALONE, Place
from sapwood_worker.records.step import CompletedStep, LaunchedStep, ModelOutput, Step
from sapwood_worker.settings import SpeculateChoice

logger = logging.getLogger(__name__)


class FakeWorkerConfig(WorkerConfig):
    """A worker's configuration and what the fake runner can be told."""

    served_model_name: str | None = Field("fake", description="Name that clients use.")
    context_length: int | None = Field(4096, ge=2, description="Most tokens of prompt and output together.")
    step_ms: float = Field(1.0, ge=0, description="How long a step takes, in milliseconds.")
    speculate: SpeculateChoice = Field(
        "off", description="What is drafted; by default nothing, so that no message depends on how long steps take."
    )
    load_seconds: float = Field(0.0, ge=0, description="How long loading takes.")
    vocab_size: int = Field(1000, ge=2, description="Number of token ids.")
    embedding_size: int = Field(0, ge=0, le=1, description="Numbers in an embedding; 0: it makes none.")
    eos_token: int | None = Field(None, ge=0, description="The model's end token; none: there is none.")
    stall_token: int | None = Field(
        None, ge=0, description="A prompt that begins with it stalls the step it begins in."
    )
    stall_seconds: float = Field(0.0, ge=0, description="For how long.")
    stall_computes: bool = Field(
        False, description="The stall is a computation that holds the interpreter's lock; else it waits."
    )
    poison_token: int | None = Field(None, ge=0, description="A prompt that begins with it makes its step fail.")
    diverge_token: int | None = Field(
        None, ge=0, description="A prompt that begins with it has the last rank compute something else than the others."
    )
    refusing_rank: int | None = Field(None, ge=0, description="The rank that cannot load its model.")


def make_runner(config: FakeWorkerConfig, place: Place = ALONE) -> FakeRunner | StallingRunner | DivergingRunner:
    """The runner factory for the scheduler process and the other ranks."""
    if config.refusing_rank == place.rank:
        raise ConfigError("this rank loads no model")
    num_pages = config.num_pages or 1024
    info = ModelInfo(
        architecture="fake",
        dtype="none",
        context_length=min(config.context_length or 4096, num_pages * config.page_size),
        vocab_size=config.vocab_size,
        eos_token_ids=() if config.eos_token is None else (config.eos_token,),
        page_size=config.page_size,
        num_pages=num_pages,
        embedding_size=config.embedding_size,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel.stages,
        attention_ranks=config.tensor_parallel if config.data_parallel_attention else 1,
        lora_slots=config.lora_slots.slots,
        max_lora_rank=config.lora_slots.rank if config.lora_slots.slots else 0,
    )
    if config.load_seconds:
        logger.info("loading for %g s", config.load_seconds)
        time.sleep(config.load_seconds)
    vocabulary = _vocabulary(config.vocab_size) if config.structured_output.on else None
    host_pages = host_pool_pages(
        page_bytes=config.page_size * 8,
        num_device_pages=num_pages,
        gigabytes=config.host_cache.gb,
        ratio=config.tier_ratio,
    )
    size = config.page_size * 8
    memory = SharedMemory.create(pool_bytes(host_pages, size)) if host_pages and config.shares_host_cache else None
    host_pool = HostPool(host_pages, size, memory) if host_pages else None
    runner = FakeRunner(info, config.step_ms / 1000, config.poison_token, vocabulary, host_pool)
    if config.stall_token is not None:
        return StallingRunner(runner, config.stall_token, config.stall_seconds, computes=config.stall_computes)
    if config.diverge_token is not None and place.rank == place.size - 1:
        return DivergingRunner(runner, config.diverge_token)
    return runner


class _AroundRunner:
    """A :class:`FakeRunner` that does something else for some prompts.

    Args:
        runner: What computes.
        token: Such a prompt begins with it.
    """

    def __init__(self, runner: FakeRunner, token: int) -> None:
        self._runner = runner
        self._token = token
        self.info = runner.info
        self.vocabulary = runner.vocabulary
        self.experts = runner.experts
        self.exchanged_bytes = runner.exchanged_bytes
        self.sums, self.check_pictures = runner.sums, runner.check_pictures
        self.picture_use = runner.picture_use
        self.draft = runner.draft
        self.host_pool = runner.host_pool
        self.asynchronous = runner.asynchronous
        self.read_lora, self.drop_lora = runner.read_lora, runner.drop_lora

    def execute(self, step: Step) -> ModelOutput:
        return self.launch(step).result()

    def launch(self, step: Step) -> LaunchedStep:
        return self._runner.launch(step)

    def _begins(self, step: Step) -> bool:
        """Whether such a prompt begins in a step."""
        firsts = step.token_ids[np.cumsum(step.counts) - step.counts]
        return bool(((step.starts == 0) & (firsts == self._token)).any())


class StallingRunner(_AroundRunner):
    """A :class:`FakeRunner` that takes its time for the first step of some prompts.

    Args:
        runner: What computes.
        token: A prompt that begins with it stalls the step it begins in.
        seconds: For how long.
        computes: Whether it computes meanwhile, with the interpreter's lock held; else it waits.
    """

    def __init__(self, runner: FakeRunner, token: int, seconds: float, *, computes: bool) -> None:
        super().__init__(runner, token)
        self._seconds = seconds
        self._computes = computes

    def launch(self, step: Step) -> LaunchedStep:
        if self._begins(step):
            if self._computes:
                _compute(self._seconds)
            else:
                time.sleep(self._seconds)
        return self._runner.launch(step)


class DivergingRunner(_AroundRunner):
    """A :class:`FakeRunner` that answers some prompts differently, or, with requests of its own, gets other rows with them.

    Args:
        runner: What computes.
        token: Such a prompt begins with it.
    """

    def launch(self, step: Step) -> LaunchedStep:
        output = self._runner.launch(step).result()
        if self._begins(step):
            output.seen += 1
            if self.info.attention_ranks == 1:
                output.token_ids = [[token + 1 for token in tokens] for tokens in output.token_ids]
        return CompletedStep(output)


def _compute(seconds: float) -> None:
    """Computes for about so long in one call of C code, during which no other thread gets the interpreter's lock."""
    probe = 10**6
    began = time.monotonic()
    sum(range(probe))
    sum(range(int(probe * seconds / (time.monotonic() - began))))


def _vocabulary(size: int) -> TokenVocabulary:
    """To a grammar, token i below 256 is byte i; the others stand for nothing."""
    return TokenVocabulary(tuple(bytes([token]) if token < 256 else b"" for token in range(size)), frozenset())
