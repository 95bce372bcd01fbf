"""Adapters of a group of ranks: every rank reads and forgets the same ones as the leader, while steps run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError
from sapwood_testing.worker.fake_runner import FakeRunner, continuation, fake_digest, fake_lora
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import GroupRunner
from sapwood_worker.records.lora import Lora, LoraLoad
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.step import Entry, Masks, ReadyMasks, Step

INFO = ModelInfo(
    architecture="fake", dtype="none", context_length=64, vocab_size=997, eos_token_ids=(), page_size=4, num_pages=8,
    lora_slots=2, max_lora_rank=16,
)  # fmt: skip
PROMPT = [3, 4, 5]


@contextmanager
def group_of_two() -> Iterator[tuple[GroupRunner, list[FakeRunner]]]:
    here, there = Pipe()
    runners = [FakeRunner(INFO), FakeRunner(INFO)]
    follower = threading.Thread(target=follow, args=(runners[1], there))
    follower.start()
    try:
        runner: Any = runners[0]
        yield GroupRunner(runner, [here]), runners
    finally:
        here.close()
        follower.join()


class Always(random.Random):
    """Has a step be computed when it is launched."""

    def random(self) -> float:
        return 0.0


def prompt_step(number: int, slot: int, loads: tuple[LoraLoad, ...] = ()) -> Step:
    one = np.ones(1, np.int64)
    step = Step(number, 0 * one, 0 * one, len(PROMPT) * one, one, np.array(PROMPT), np.zeros((1, 1), np.int32))
    step.entries = (Entry(0, number, SamplingParams(temperature=0.0, seed=1), lora_slot=slot),)
    step.lora_loads = loads
    return step


def first_token(digest: bytes) -> int:
    return next(continuation(PROMPT, SamplingParams(temperature=0.0, seed=1), INFO.vocab_size, digest))


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


def test_every_rank_reads_an_adapter_computes_with_it_and_forgets_it(tmp_path: Path) -> None:
    folder = fake_lora(tmp_path / "one", "one")
    with group_of_two() as (group, runners):
        facts = group.read_lora(Lora(1, "one", str(folder)))
        assert facts.digest == fake_digest(folder)
        eventually(lambda: runners[1].loras == {1})
        with_it = group.launch(prompt_step(0, 1, (LoraLoad(1, 1),))).result()
        without = group.launch(prompt_step(1, -1)).result()
        assert with_it.token_ids == [[first_token(facts.digest)]] != without.token_ids == [[first_token(b"")]]
        group.drop_lora(1)
        group.launch(prompt_step(2, -1)).result()
        assert runners[0].loras == runners[1].loras == set()


def test_an_adapter_that_cannot_be_read_leaves_the_group_working(tmp_path: Path) -> None:
    with group_of_two() as (group, runners):
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            group.read_lora(Lora(1, "none", str(tmp_path / "missing")))
        assert group.launch(prompt_step(0, -1)).result().token_ids == [[first_token(b"")]]
        assert runners[0].loras == runners[1].loras == set()


def test_an_adapter_read_during_a_step_does_not_get_between_the_step_and_its_masks(tmp_path: Path) -> None:
    folder = fake_lora(tmp_path / "one", "one")
    allowed = np.zeros((1, 32), np.int32)
    allowed[0, 0] = 1 << 7
    with group_of_two() as (group, runners):
        reading: list[threading.Thread] = []

        class Late(ReadyMasks):
            """Masks that come after another thread has begun to read an adapter."""

            def result(self) -> Masks:
                reading.append(threading.Thread(target=group.read_lora, args=(Lora(1, "one", str(folder)),)))
                reading[0].start()
                time.sleep(0.1)
                return super().result()

        step = prompt_step(0, -1)
        step.masked, step.masks = np.zeros(1, np.int64), Late(allowed)
        assert isinstance(group._runner, FakeRunner)
        # As a runner without a device of its own, it computes, and asks for the masks, while the step is launched.
        group._runner._chance = Always()
        assert group.launch(step).result().token_ids == [[7]]
        reading[0].join()
        eventually(lambda: runners[1].loras == {1})
