"""Steps in wire form: what is read is what was written, and a runner in another process computes from it what one here does."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.group.follower import follow
from sapwood_worker.core.group.group_runner import GroupRunner
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.expert_load import ExpertMove
from sapwood_worker.records.lora import LoraLoad
from sapwood_worker.records.step import CacheLoad, Copies, Entry, PageCopy, Step
from sapwood_worker.records.step_wire import encode, encode_masks, read, read_masks

VOCAB = 97
WORDS = 4


def numbers(dtype: type[np.generic], *shape: int, low: int = 0) -> st.SearchStrategy[Any]:
    """Arrays of a shape, filled from a seed."""
    return st.integers(0, 2**32 - 1).map(
        lambda seed: np.random.default_rng(seed).integers(low, 2**31 - 1, shape).astype(dtype)
    )


def filled(masks: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(masks)
    return future


samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    bad_words_ids=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 3),
)
entries = st.builds(
    Entry,
    lora_slot=st.integers(-1, 255),
    row=st.integers(0, 63),
    serial=st.integers(0, 2**62),
    sampling=samplings,
    output_start=st.integers(0, 99),
    tokens=st.binary(max_size=5).map(lambda data: 4 * data),
    prompt_length=st.integers(0, 99),
    prompt_logprobs=st.none() | st.integers(0, 3),
    pooling=st.sampled_from(["", "mean", "last", "cls"]),
)
pages = st.none() | st.integers(0, 5).flatmap(
    lambda count: st.builds(
        PageCopy,
        st.integers(0, 99),
        *(numbers(np.int32, count) for _ in range(2)),
        st.lists(numbers(np.int32, count, low=-1), max_size=2).map(tuple),
    )
)
loads = st.lists(st.builds(CacheLoad, st.integers(0, 9), st.integers(1, 9)), max_size=2).map(tuple)
adapters = st.lists(st.builds(LoraLoad, st.integers(0, 255), st.integers(1, 2**40)), max_size=2).map(tuple)
moves = st.lists(st.builds(ExpertMove, st.integers(0, 60), st.integers(0, 300), st.integers(-1, 300)), max_size=3).map(
    tuple
)
copies = st.none() | st.builds(Copies, pages, pages, st.booleans(), loads)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    parts, tokens, width, masked = (draw(st.integers(0, most)) for most in (5, 40, 7, 4))
    return Step(
        draw(st.integers(0, 2**40)),
        *(draw(numbers(np.int64, parts)) for _ in range(4)),
        token_ids=draw(numbers(np.int64, tokens, low=-1)),
        pages=draw(numbers(np.int32, parts, width)),
        entries=tuple(draw(st.lists(entries, max_size=3))),
        masked=draw(numbers(np.int64, masked)),
        masks=filled(draw(numbers(np.int32, masked, WORDS))) if masked else None,
        copies=draw(copies),
        moves=draw(moves),
        lora_loads=draw(adapters),
        page_copies=draw(numbers(np.int64, draw(st.integers(0, 3)), 3)),
        joins=draw(numbers(np.int64, draw(st.integers(0, 3)), 2)),
    )


def plain(step: Step) -> list[Any]:
    """All of a step, in values that can be compared."""

    def of(copy: PageCopy | None) -> Any:
        return copy and (copy.number, *(each.tolist() for each in (copy.device, copy.host, *copy.windows)))

    arrays = (
        step.rows,
        step.starts,
        step.counts,
        step.samples,
        step.token_ids,
        step.pages,
        step.masked,
        step.page_copies,
        step.joins,
    )
    masks = None if step.masks is None else step.masks.result().tolist()
    moved = step.copies and (of(step.copies.store), of(step.copies.load), step.copies.fence, step.copies.loads)
    return [
        step.number,
        *((each.dtype, each.tolist()) for each in arrays),
        step.entries,
        masks,
        moved,
        step.moves,
        step.lora_loads,
    ]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_what_is_read_is_what_was_written(step: Step) -> None:
    found = read(encode(step), step.masks)
    assert plain(found) == plain(step)
    if step.masks is not None:
        masks = step.masks.result()
        assert read_masks(bytearray(encode_masks(masks)), len(masks)).tolist() == masks.tolist()


def test_a_step_is_read_in_place() -> None:
    buffer = encode(Step(1, token_ids=np.arange(9)))
    step = read(buffer)
    assert all(not each.flags.owndata for each in (step.rows, step.token_ids, step.pages))
    buffer[buffer.index(bytes([8, 0, 0, 0, 0, 0, 0, 0]), 64)] = 7  # after the header: token 8
    assert step.token_ids.tolist() == [*range(8), 7]


@pytest.mark.parametrize("size", [0, 63, 64, 100])
def test_what_holds_no_whole_step_is_refused(size: int) -> None:
    step = Step(1, *(np.ones(1, np.int64) for _ in range(5)), pages=np.zeros((1, 1), np.int32))
    buffer = encode(step)
    with pytest.raises(ValueError, match="step"):
        read(buffer[:size])
    with pytest.raises(ValueError, match="step"):
        read(bytearray(len(buffer)))


def serve(path: Path, leader: Connection) -> None:
    """Another process: follows with a runner of its own."""
    follow(build_runner(RunnerOptions(model_path=path, num_pages=40, max_running=8, threads=1)), leader)


@contextmanager
def other_process(path: Path) -> Iterator[Connection]:
    """The way to a follower in another process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(path, there), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(30)
        process.kill()


def test_a_follower_in_another_process_samples_the_tokens_of_the_leader(tiny_model: Any) -> None:
    path = tiny_model("llama").path
    vocabulary = TokenVocabulary(tuple(bytes([32 + token]) for token in range(VOCAB)), frozenset())
    store = GrammarStore(vocabulary, VOCAB, (2,))
    source = GrammarSource("regex", "[a-f]{3,9}x[0-9]{2,20}")
    lark = GrammarBuilder(vocabulary.special_names).compile(source)
    compiled = GrammarArtefact.of(source, vocabulary.fingerprint, lark).to_bytes()
    runner = build_runner(RunnerOptions(model_path=path, num_pages=40, max_running=8, threads=1))
    scheduler = scheduler_for(runner.info, masks=TokenMasks(VOCAB), context_length=640, max_step_tokens=64)
    chance = random.Random(5)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 40},
        {"presence_penalty": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"frequency_penalty": 0.5, "prompt_logprobs": 1, "logit_bias": {7: 3.0}},
        {"allowed_token_ids": tuple(range(3, 40)), "bad_words_ids": ((7, 8), (9,)), "min_tokens": 9},
        {"grammar": True},
        {"grammar": True, "temperature": 0.0, "logprobs": 1},
    ]
    for serial, each in enumerate(asked):
        grammar = store.build(compiled) if each.pop("grammar", False) else None
        params = SamplingParams(**{"seed": serial, "max_tokens": 16, **each})
        prompt = [chance.randrange(3, VOCAB) for _ in range(chance.randrange(2, 40))]
        scheduler.add(Request(serial, f"r{serial}", prompt, params, grammar=grammar))
    taken: list[int] = []
    entered = 0
    with other_process(path) as follower:
        group = GroupRunner(runner, [follower])
        while scheduler.has_work:
            step = scheduler.schedule()
            answer = group.execute(step)  # which the other has sampled too, or this raises
            taken.append(sum(map(len, answer.token_ids)))
            entered += len(step.entries)
            scheduler.update(answer)
            if len(taken) == 9:  # all are sent back, and enter again with what they have generated
                scheduler.pause(retract=True)
                scheduler.resume()
    assert sum(taken) > 70
    assert entered > len(asked)
