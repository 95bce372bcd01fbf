"""Scheduler and real runner together: whatever the batches, chunks, pages and retractions, the tokens are transformers' own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.runner.model_runner import LaunchedStep, ModelRunner
from sapwood_worker.records.output import RequestOutput, TokenLogprobs

TOKENS = 24


def check_greedy(model: Any, prompt: list[int], received: list[int], count: int, tolerance: float) -> None:
    """Each token must be the model's likeliest after those before it, or as good as that: one pass looks at all of them."""
    assert len(received) == count
    logits = model.logits(prompt + received)[len(prompt) - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(received)[:, None])[:, 0]
    assert float(gaps.max()) < tolerance, f"tokens {(gaps >= tolerance).nonzero()[:, 0].tolist()} after {prompt}"


def drive(scheduler: Scheduler, runner: ModelRunner, overlap: bool) -> Iterator[RequestOutput]:
    """Runs all there is to do, each step launched before the result of the one before is taken if ``overlap``."""
    launched: deque[LaunchedStep] = deque()
    while scheduler.has_work:
        planned = scheduler.schedule()
        if planned:
            launched.append(runner.launch(planned))
        while len(launched) > (1 if planned and overlap else 0):
            yield from scheduler.update(launched.popleft().result())
        scheduler.check()


def prompts() -> list[list[int]]:
    chance = random.Random(5)
    shared = [chance.randrange(3, 97) for _ in range(40)]
    lengths = [0, 7, 16, 33, 40, 40, 25, 3]
    return [
        shared[:length] + [chance.randrange(3, 97) for _ in range(1 + index % 4)]
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("page_size", "max_step_tokens", "pool_tokens", "name", "overlap"),
    [
        *(
            (*sizes, *model)
            for sizes in ((1, 512, 2048), (4, 16, 160), (16, 32, 144), (16, 5, 2048), (64, 512, 512))
            for model in (("llama", True), ("gemma3", False), ("mistral-window", True))
        ),
        (4, 16, 160, "llama4", True),  # chunks of 16 tokens
    ],
)
def test_greedy_tokens_do_not_depend_on_scheduling(
    tiny_model: Any, make_runner: Any, name: str, page_size: int, max_step_tokens: int, pool_tokens: int, overlap: bool
) -> None:
    tiny = tiny_model(name)
    num_pages = pool_tokens // page_size
    runner = make_runner(tiny.path, page_size=page_size, num_pages=num_pages, max_running=6)
    scheduler = scheduler_for(runner.info, max_step_tokens=max_step_tokens, conservativeness=0.0)
    for serial, prompt in enumerate(prompts()):
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        scheduler.add(Request(serial, f"r{serial}", prompt, sampling))
    received: dict[int, list[int]] = {}
    for output in drive(scheduler, runner, overlap):
        received.setdefault(output.serial, []).extend(output.token_ids)
    if pool_tokens <= 160:
        assert scheduler.num_retractions > 0, "the pool is too large for the test to mean much"
    assert scheduler.load().cached_tokens > 0
    for serial, prompt in enumerate(prompts()):
        check_greedy(tiny, prompt, received[serial], TOKENS, 1e-4)


def test_windows_over_all_layers_hold_few_pages_however_long_a_text_is(tiny_model: Any, make_runner: Any) -> None:
    tiny = tiny_model("mistral-window")  # of 11 tokens
    runner = make_runner(tiny.path, page_size=4, num_pages=128, max_running=2, max_step_tokens=16)
    [window] = runner.info.windows
    assert window.num_pages == 2 * (3 + 4) + 2 * 4 and runner.info.num_pages == 128
    scheduler = scheduler_for(runner.info, max_step_tokens=16)
    asked = [
        prompt + prompts()[-4] * 2 for prompt in prompts()[:2]
    ]  # with their outputs more than the windows' pages hold
    compare(tiny, asked, 60, scheduler, runner, overlap=True)
    assert scheduler.num_retractions == 0
    assert 4 * window.num_pages < sum(len(prompt) + 60 for prompt in asked)
    assert scheduler.load().passed_window_pages > window.num_pages


def many() -> list[list[int]]:
    """32 prompts, many with a common beginning."""
    chance = random.Random(9)
    shared = [chance.randrange(3, 97) for _ in range(80)]
    return [
        shared[: chance.choice([0, 20, 64, 80])] + [chance.randrange(3, 97) for _ in range(chance.randint(1, 30))]
        for _ in range(32)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("batch", "page_size", "chunk", "pages", "retracts"),
    [
        (1, 1, 16, 512, False), (2, 64, 64, 8, False), (4, 16, 16, 9, True), (32, 1, 64, 600, True), (32, 16, 512, 50, True),
        pytest.param(8, 16, 128, 20, True, marks=pytest.mark.slow), pytest.param(16, 64, 512, 32, False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_batches_of_up_to_32_answer_as_transformers_does(
    tiny_model: Any,
    make_runner: Any,
    batch: int,
    page_size: int,
    chunk: int,
    pages: int,
    retracts: bool,
    overlap: bool,
) -> None:
    tiny = tiny_model("llama")
    runner = make_runner(tiny.path, page_size=page_size, num_pages=max(pages, batch), max_running=batch)
    scheduler = scheduler_for(runner.info, max_step_tokens=chunk, conservativeness=0.0)
    compare(tiny, many(), TOKENS, scheduler, runner, overlap)
    assert (scheduler.num_retractions > 0) == retracts


def test_what_was_retracted_from_large_pages_answers_as_transformers_does(tiny_model: Any, make_runner: Any) -> None:
    """Outputs longer than a page of 64 tokens: admission keeps one page for each."""
    tiny = tiny_model("llama")
    runner = make_runner(tiny.path, page_size=64, num_pages=8, max_running=4)
    for overlap in (False, True):
        scheduler = scheduler_for(runner.info, max_step_tokens=64, conservativeness=0.0)
        compare(tiny, many()[:4], 140, scheduler, runner, overlap)
        assert scheduler.num_retractions > 0


def compare(model: Any, asked: list[list[int]], count: int, scheduler: Scheduler, runner: Any, overlap: bool) -> None:
    """Lets all prompts run and looks at their tokens, of which each has so many."""
    for serial, prompt in enumerate(asked):
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        scheduler.add(Request(serial, f"r{serial}", prompt, sampling))
    received: dict[int, list[int]] = {}
    for output in drive(scheduler, runner, overlap):
        received.setdefault(output.serial, []).extend(output.token_ids)
    for serial, prompt in enumerate(asked):
        check_greedy(model, prompt, received[serial], count, 1e-3)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_the_demo_model_answers_alike_in_all_batches_chunks_and_pages(
    demo_model: Any, demo_oracle: Any, make_runner: Any
) -> None:
    class Oracle:
        def logits(self, tokens: list[int]) -> Any:
            with torch.inference_mode():
                return demo_oracle(torch.tensor([tokens])).logits[0]

    chance = random.Random(2)
    beginning = [2, 818, 5279, 529, 7001, 563] + [chance.randrange(1000, 20_000) for _ in range(60)]
    asked = [
        beginning[: 6 + 5 * index] + [chance.randrange(1000, 20_000) for _ in range(index % 3)] for index in range(12)
    ]
    for batch, page_size, chunk, pages in ((1, 1, 16, 200), (4, 64, 512, 6), (12, 16, 16, 20), (12, 1, 64, 400)):
        runner = make_runner(demo_model, page_size=page_size, num_pages=max(pages, batch), max_running=batch)
        for overlap in (False, True):
            scheduler = scheduler_for(runner.info, max_step_tokens=chunk, conservativeness=0.0)
            compare(Oracle(), asked, 6, scheduler, runner, overlap)


def test_seeded_sampling_does_not_depend_on_scheduling(tiny_model: Any, make_runner: Any) -> None:
    path = tiny_model("llama").path
    answers = []
    for max_running, max_step_tokens, pages, overlap in (
        (1, 512, 64, False),
        (6, 9, 64, True),
        (6, 32, 9, False),
        (6, 32, 9, True),
    ):
        runner = make_runner(path, page_size=16, num_pages=pages, max_running=max_running)
        scheduler = scheduler_for(runner.info, max_step_tokens=max_step_tokens, conservativeness=0.0)
        for serial, prompt in enumerate(prompts()):
            scheduler.add(Request(serial, f"r{serial}", prompt, _setting(serial)))
        received: dict[int, list[int]] = {}
        for output in drive(scheduler, runner, overlap):
            received.setdefault(output.serial, []).extend(output.token_ids)
        answers.append(received)
    assert scheduler.num_retractions > 0
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
    assert answers[3] == answers[0]
    for serial, prompt in enumerate(prompts()):
        for cut in (1, TOKENS // 2):
            resumed = [*prompt, *answers[0][serial][:cut]]
            scheduler.add(Request(99, "resumed", resumed, _setting(serial, cut), output_tokens=cut))
            rest: list[int] = []
            while scheduler.has_work:
                for output in scheduler.update(runner.execute(scheduler.schedule())):
                    rest += output.token_ids
            assert answers[0][serial][:cut] + rest == answers[0][serial], "resumed from its prefix"


@pytest.mark.parametrize(
    ("name", "page_size", "max_step_tokens", "overlap"),
    [
        ("llama", 16, 512, False),
        ("llama", 16, 7, True),
        ("gemma3", 4, 512, True),
        ("mistral-window", 16, 16, False),
    ],
)
def test_answers_that_share_a_prompts_last_logits_are_those_of_separate_requests(
    tiny_model: Any, make_runner: Any, name: str, page_size: int, max_step_tokens: int, overlap: bool
) -> None:
    runner = make_runner(tiny_model(name).path, page_size=page_size, num_pages=512 // page_size, max_running=9)
    prompt = prompts()[4]
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2),
        *(_setting(serial) for serial in range(6)),
        SamplingParams(seed=7, max_tokens=TOKENS, ignore_eos=True, logprobs=1, allowed_token_ids=(5, 6, 7, 8)),
        SamplingParams(seed=8, max_tokens=TOKENS, ignore_eos=True, bad_words_ids=((5,), (6, 7))),
    ]

    def answers(together: bool) -> tuple[dict[int, list[int]], dict[int, list[TokenLogprobs]], int]:
        scheduler = scheduler_for(runner.info, max_step_tokens=max_step_tokens)
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        cached = 0
        for serial, sampling in enumerate(wanted):
            scheduler.add(Request(serial, f"r{serial}", prompt, sampling))
            if not together or serial == len(wanted) - 1:
                for output in drive(scheduler, runner, overlap):
                    tokens.setdefault(output.serial, []).extend(output.token_ids)
                    logprobs.setdefault(output.serial, []).extend(output.logprobs)
                    cached += output.cached_tokens * (output.finish_reason is not None)
        return tokens, logprobs, cached

    apart, apart_logprobs, _ = answers(together=False)
    joined, joined_logprobs, cached = answers(together=True)
    assert cached == (len(wanted) - 1) * len(prompt), "not all of them have joined"
    assert joined == apart
    for serial in (0, 7):
        pairs = zip(joined_logprobs[serial], apart_logprobs[serial], strict=True)
        assert all(one.logprob == pytest.approx(other.logprob, abs=1e-4) for one, other in pairs)


def _setting(serial: int, done: int = 0) -> SamplingParams:
    """Settings that differ between requests; ``done`` tokens of output are there already."""
    return SamplingParams(
        temperature=0.8,
        top_p=0.95,
        seed=serial,
        max_tokens=TOKENS - done,
        ignore_eos=True,
        presence_penalty=0.5 * (serial % 2),
        frequency_penalty=0.3 * (serial % 3),
        repetition_penalty=1.2 if serial % 4 == 3 else 1.0,
        logit_bias={serial: 4.0},
        min_tokens=serial,
    )


@pytest.mark.parametrize("max_step_tokens", [512, 7])
def test_log_probabilities_of_a_prompts_end_are_the_whole_prompts_and_use_the_cache(
    tiny_model: Any, make_runner: Any, max_step_tokens: int
) -> None:
    runner = make_runner(tiny_model("gemma3").path, page_size=4, num_pages=64)
    scheduler = scheduler_for(runner.info, max_step_tokens=max_step_tokens)
    prompt = [(7 * place) % 97 + 3 for place in range(30)]
    found: dict[int, list[float]] = {}
    cached: dict[int, int] = {}
    for serial, start in enumerate((0, 19, 19, 28, 29, 200)):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0, prompt_logprobs_start=start
        )
        scheduler.add(Request(serial, f"r{serial}", prompt, sampling))
        for output in drive(scheduler, runner, overlap=False):
            found.setdefault(serial, []).extend(each.logprob for each in output.prompt_logprobs)
            cached[serial] = output.cached_tokens
    assert len(found[0]) == 29
    for serial, start in ((1, 19), (2, 19), (3, 28), (4, 29), (5, 200)):
        assert found[serial] == pytest.approx(found[0][start:], abs=1e-4), start
    assert cached == {0: 0, 1: 19, 2: 19, 3: 28, 4: 29, 5: 29}


@pytest.mark.parametrize(("max_step_tokens", "page_size", "pages"), [(512, 16, 64), (7, 16, 64), (32, 4, 28)])
def test_log_probabilities_equal_transformers_whatever_is_cached_and_retracted(
    tiny_model: Any, make_runner: Any, max_step_tokens: int, page_size: int, pages: int
) -> None:
    tiny = tiny_model("gemma3")
    runner = make_runner(tiny.path, page_size=page_size, num_pages=pages, max_running=6)
    scheduler = scheduler_for(runner.info, max_step_tokens=max_step_tokens, conservativeness=0.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=3)
    for serial, prompt in enumerate(prompts()):
        scheduler.add(Request(serial, f"r{serial}", prompt, sampling))
    of_prompt: dict[int, list[TokenLogprobs]] = {}
    of_output: dict[int, list[TokenLogprobs]] = {}
    tokens: dict[int, list[int]] = {}
    for output in drive(scheduler, runner, overlap=max_step_tokens <= 32):
        assert bool(output.prompt_logprobs) == (output.serial not in tokens and output.prompt_tokens > 1)
        of_prompt.setdefault(output.serial, []).extend(output.prompt_logprobs)
        of_output.setdefault(output.serial, []).extend(output.logprobs)
        tokens.setdefault(output.serial, []).extend(output.token_ids)
    assert (scheduler.num_retractions > 0) == (pages == 28)
    for serial, prompt in enumerate(prompts()):
        whole = prompt + tokens[serial]
        expected = tiny.logits(whole).double().log_softmax(-1)
        found = of_prompt[serial] + of_output[serial]
        assert len(found) == len(whole) - 1
        for at, each in enumerate(found):
            assert each.logprob == pytest.approx(float(expected[at, whole[at + 1]]), abs=2e-4)
            count = 3 if at < len(prompt) - 1 else 2
            assert each.top_logprobs == pytest.approx(expected[at].topk(count).values.tolist(), abs=2e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_that_slide_out_of_windows_are_freed_and_no_token_changes(
    tiny_model: Any, make_runner: Any, overlap: bool
) -> None:
    """A window of 13 tokens has fewer pages than two of these prompts; the second time they come their ends are cached."""
    tiny = tiny_model("gemma3")
    runner = make_runner(tiny.path, page_size=4, num_pages=200, max_running=4, max_step_tokens=16)
    [window] = runner.info.windows
    assert window.num_pages < 2 * 100 // 4
    scheduler = scheduler_for(runner.info, max_step_tokens=16, conservativeness=0.0)
    chance = random.Random(7)
    shared = [chance.randrange(3, 97) for _ in range(60)]
    asked = [shared + [chance.randrange(3, 97) for _ in range(40 + index)] for index in range(4)]
    compare(tiny, asked, TOKENS, scheduler, runner, overlap)
    first = scheduler.load()
    assert first.passed_window_pages > 4 * 60 // 4 and first.used_window_pages <= first.window_pages == window.num_pages
    compare(tiny, asked, TOKENS, scheduler, runner, overlap)
    assert scheduler.load().cached_tokens > first.cached_tokens
