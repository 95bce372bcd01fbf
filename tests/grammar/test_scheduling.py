"""Requests with a grammar through scheduler and loop: they end with it, survive retraction, continue on another worker, and fail
alone."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_testing.worker.fake_runner import FakeRunner
from sapwood_worker.core.event_loop import EventLoop
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.ipc.messages import Abort, FromScheduler, Refused, Shutdown, Step, Submit, ToScheduler
from sapwood_worker.model.grammar.backend import TokenMasks
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.records.grammar_state import GrammarState
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

PATTERN = "[a-f]{30,60}(x[0-9]{20}y)"
PROMPT = [1, 2, 3, 4, 5]


def make_runner(vocabulary, end_token, num_pages: int) -> FakeRunner:
    info = ModelInfo(
        architecture="fake",
        dtype="none",
        context_length=400,
        vocab_size=len(vocabulary.tokens),
        eos_token_ids=(end_token,),
        page_size=4,
        num_pages=num_pages,
    )
    return FakeRunner(info, vocabulary=vocabulary)


def make_scheduler(vocabulary: TokenVocabulary, end_token: int, num_pages: int, **settings: Any) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            page_size=4, num_pages=num_pages, context_length=400, eos_token_ids=frozenset({end_token}), **settings
        ),
        masks=TokenMasks(len(vocabulary.tokens)),
    )


@pytest.fixture
def grammar_store(vocabulary, end_token) -> GrammarStore:
    return GrammarStore(vocabulary, len(vocabulary.tokens), (end_token,))


@pytest.fixture
def run(vocabulary, end_token) -> Callable[..., tuple[dict[int, list[int]], dict[int, RequestOutput], Scheduler]]:
    """Runs requests to their end; their tokens, their last outputs, and the scheduler."""

    def run_(requests: list[Request], num_pages: int = 400, **settings: Any):
        scheduler, runner = (
            make_scheduler(vocabulary, end_token, num_pages, **settings),
            make_runner(vocabulary, end_token, num_pages),
        )
        tokens: dict[int, list[int]] = {request.serial: [] for request in requests}
        last: dict[int, RequestOutput] = {}
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            for output in scheduler.update(runner.execute(scheduler.schedule())):
                tokens[output.serial] += output.token_ids
                if output.finish_reason is not None:
                    last[output.serial] = output
            scheduler.check()
        return tokens, last, scheduler

    return run_


def constrained(store, compiled: bytes, serial: int, prompt: list[int], generated: int = 0, **sampling) -> Request:
    params = SamplingParams(**({"seed": serial, "max_tokens": 200} | sampling))
    state = store.build(compiled, prompt[len(prompt) - generated :])
    return Request(serial, f"r{serial}", prompt, params, grammar=state)


def text_of(vocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()


def test_requests_with_and_without_grammar_share_batches_and_each_ends_as_it_should(
    run, grammar_store, compile_grammar, vocabulary
):
    compiled = compile_grammar("regex", PATTERN)
    unbound = [SamplingParams(seed=serial, max_tokens=40, ignore_eos=True) for serial in (0, 2)]
    free = [Request(serial, f"r{serial}", PROMPT, params) for serial, params in zip((0, 2), unbound, strict=True)]
    bound = [constrained(grammar_store, compiled, serial, PROMPT) for serial in (1, 3)]
    tokens, last, _ = run([free[0], bound[0], free[1], bound[1]])
    for serial in (1, 3):
        assert re.fullmatch(PATTERN, text_of(vocabulary, tokens[serial]))
        assert last[serial].finish_reason == "stop"
        assert last[serial].completion_tokens == len(tokens[serial])
    alone, _, _ = run([Request(0, "r0", PROMPT, unbound[0])])
    assert tokens[0] == alone[0]
    assert last[0].finish_reason == "length"
    alone, _, _ = run([constrained(grammar_store, compiled, 3, PROMPT)])
    assert tokens[3] == alone[3]
    assert [last[serial].cached_tokens for serial in range(4)] == [0, 5, 5, 5], "they have computed the prompt alone"


def test_an_end_token_ends_an_output_to_which_more_could_be_added(
    run, grammar_store, compile_grammar, vocabulary, end_token
):
    compiled = compile_grammar("regex", "[a-b]+")
    tokens, last, _ = run([constrained(grammar_store, compiled, serial, PROMPT) for serial in range(8)])
    for serial, output in last.items():
        assert output.finish_reason == "stop"
        assert tokens[serial][-1] == end_token
        assert re.fullmatch("[a-b]+", text_of(vocabulary, tokens[serial][:-1]))


def test_max_tokens_cuts_an_output_short(run, grammar_store, compile_grammar):
    compiled = compile_grammar("regex", PATTERN)
    tokens, last, _ = run([constrained(grammar_store, compiled, 1, PROMPT, max_tokens=7)])
    assert len(tokens[1]) == 7
    assert last[1].finish_reason == "length"


@pytest.mark.parametrize(("num_pages", "max_step_tokens"), [(400, 512), (400, 7), (40, 512)])
def test_forced_tokens_are_not_sampled_and_the_output_is_the_same(
    run, grammar_store, compile_grammar, vocabulary, num_pages, max_step_tokens
):
    # "x" to "y" and what follows is forced but for the digits; no token of the vocabulary spells two of these bytes.
    pattern = "[a-f]{5}xyzzy-[0-9]{3}-plugh-[a-f]{5}#!"
    compiled = compile_grammar("regex", pattern)
    answers = []
    for jump in (False, True):
        requests = [constrained(grammar_store, compiled, serial, [*PROMPT, serial]) for serial in range(12)]
        requests.append(constrained(grammar_store, compiled, 12, PROMPT, max_tokens=8))
        requests.append(constrained(grammar_store, compiled, 13, PROMPT, stop_token_ids=(ord("-"),)))
        requests.append(constrained(grammar_store, compiled, 14, PROMPT, logprobs=0))
        requests.append(constrained(grammar_store, compiled, 15, PROMPT, min_tokens=5))
        tokens, last, scheduler = run(
            requests, num_pages, jump_forward=jump, max_step_tokens=max_step_tokens, conservativeness=0.0
        )
        answers.append(
            (tokens, {serial: (output.finish_reason, output.completion_tokens) for serial, output in last.items()})
        )
        assert (scheduler.load().forced_tokens > 12 * 10) == jump
        assert scheduler.num_retractions > 0 or num_pages == 400
    assert answers[0] == answers[1]
    assert re.fullmatch(pattern, text_of(vocabulary, tokens[3]))
    assert (last[12].finish_reason, last[13].finish_reason) == ("length", "stop")
    assert text_of(vocabulary, tokens[13]).endswith("zzy-")


def test_retraction_changes_no_token(run, grammar_store, compile_grammar):
    compiled = compile_grammar("regex", PATTERN)

    def requests() -> list[Request]:
        return [constrained(grammar_store, compiled, serial, PROMPT) for serial in range(6)]

    roomy, _, _ = run(requests())
    tight, _, scheduler = run(requests(), num_pages=40)
    assert scheduler.num_retractions > 0
    assert tight == roomy


@pytest.mark.parametrize("cut", [1, 9, 33])
def test_a_request_resumed_from_its_prefix_goes_on_alike(run, grammar_store, compile_grammar, cut):
    compiled = compile_grammar("regex", PATTERN)
    tokens, _, _ = run([constrained(grammar_store, compiled, 1, PROMPT)])
    rest, last, _ = run([constrained(grammar_store, compiled, 1, PROMPT + tokens[1][:cut], generated=cut)])
    assert tokens[1][:cut] + rest[1] == tokens[1]
    assert last[1].finish_reason == "stop"


class Contrary:
    """A grammar that refuses its third token, as one does whose lexer has run out of fuel."""

    def __init__(self) -> None:
        self.error = ""
        self.finished = False
        self.closed = 0
        self._accepted = 0

    def accept(self, token_id: int) -> bool:
        self._accepted += 1
        if self._accepted == 3:
            self.error, self.finished = "too complex", True
        return not self.error

    def fill(self, mask) -> None:
        mask[:] = -1

    def forced(self) -> None:
        return None

    def guess(self, most: int, token_ids, start: int) -> list[int]:
        return []

    def close(self) -> None:
        self.closed += 1


def test_a_grammar_that_fails_ends_its_request_and_no_other(run):
    state = Contrary()
    requests = [
        Request(0, "r0", PROMPT, SamplingParams(max_tokens=20), grammar=state),
        Request(1, "r1", PROMPT, SamplingParams(max_tokens=20)),
    ]
    tokens, last, _ = run(requests)
    assert len(tokens[0]) == 2
    assert (last[0].finish_reason, last[0].error, last[0].error_field) == ("error", "grammar: too complex", "grammar")
    assert len(tokens[1]) == 20
    assert state.closed == 1


def test_an_aborted_request_closes_its_grammar(vocabulary, end_token):
    scheduler, state = make_scheduler(vocabulary, end_token, 40), Contrary()
    scheduler.add(Request(0, "r0", PROMPT, SamplingParams(), grammar=state))
    assert scheduler.abort(0)
    assert state.closed == 1


def test_a_plan_does_not_wait_for_masks_and_touches_no_unfilled_grammar(vocabulary, end_token):
    class Slow:
        """Fills masks when it is told to."""

        def __init__(self) -> None:
            self.filled: Future[Any] = Future()

        def start(self, states: Sequence[GrammarState], drafts: Sequence[Sequence[int]] = ()) -> Future[Any]:
            return self.filled

    scheduler, state, slow = make_scheduler(vocabulary, end_token, 40), Contrary(), Slow()
    scheduler._masks = slow
    scheduler.add(Request(0, "r0", PROMPT, SamplingParams(), grammar=state))
    step = scheduler.schedule()
    assert step.masks is slow.filled and step.masked.tolist() == [0]
    assert scheduler.abort(0)
    assert not state.closed
    ended = Thread(target=scheduler.fail_step, args=("the step failed",))
    ended.start()
    ended.join(0.05)
    assert ended.is_alive() and not state.closed
    slow.filled.set_result(None)
    ended.join(60)
    assert state.closed == 1


class Script:
    """A channel that hands out one batch of messages each time the loop has nothing left to do, then a shutdown."""

    def __init__(self, *batches: list[ToScheduler]) -> None:
        self.sent: list[FromScheduler] = []
        self._batches = [*batches, [Shutdown()]]

    def receive(self, *, wait: bool) -> list[ToScheduler]:
        return self._batches.pop(0) if wait else []

    def send(self, message: FromScheduler) -> None:
        self.sent.append(message)

    def outputs(self, serial: int) -> list[RequestOutput]:
        return [out for step in self.sent if isinstance(step, Step) for out in step.outputs if out.serial == serial]


@pytest.fixture
def loop(vocabulary, end_token, grammar_store) -> Callable[..., Script]:
    def run_(*batches: list[ToScheduler]) -> Script:
        channel = Script(*batches)
        EventLoop(
            make_scheduler(vocabulary, end_token, 100), make_runner(vocabulary, end_token, 100), channel, grammar_store
        ).run()
        return channel

    return run_


def submit(serial: int, compiled: bytes, tokens: list[int], count: int = 0) -> Submit:
    return Submit(serial, f"r{serial}", array("I", tokens).tobytes(), SamplingParams(max_tokens=200), compiled, count)


def test_the_loop_lets_a_request_in_when_its_grammar_is_built(loop, compile_grammar, vocabulary):
    compiled = compile_grammar("regex", PATTERN)
    channel = loop([submit(0, compiled, PROMPT), submit(1, b"", PROMPT), submit(2, compiled, PROMPT)])
    for serial in (0, 2):
        outputs = channel.outputs(serial)
        assert outputs[-1].finish_reason == "stop"
        text = text_of(vocabulary, [token for output in outputs for token in output.token_ids])
        assert re.fullmatch(PATTERN, text)
    assert channel.outputs(1)[-1].finish_reason in ("stop", "length")


def test_the_loop_refuses_what_cannot_be_built_and_goes_on(loop, compile_grammar):
    compiled = compile_grammar("regex", "abc")
    channel = loop(
        [submit(0, compiled[:-1], PROMPT)], [submit(1, compiled, [*PROMPT, *b"ax"], 2)], [submit(2, compiled, PROMPT)]
    )
    refused = {message.serial: message for message in channel.sent if isinstance(message, Refused)}
    assert refused[0].field == "grammar.compiled"
    assert refused[0].kind == InvalidArgumentError.__name__
    assert refused[1].field == "output_tokens"
    assert channel.outputs(2)[-1].finish_reason == "stop"


def test_a_request_that_goes_on_where_nothing_is_left_ends_at_once(loop, compile_grammar):
    channel = loop([submit(0, compile_grammar("regex", "abc"), [*PROMPT, *b"abc"], 3)])
    (output,) = channel.outputs(0)
    assert (output.finish_reason, output.token_ids, output.prompt_tokens) == ("stop", [], 8)


def test_a_request_aborted_while_its_grammar_is_built_is_never_seen_again(loop, compile_grammar):
    compiled = compile_grammar("regex", PATTERN)
    channel = loop([submit(0, compiled, PROMPT), Abort(0)], [submit(1, compiled, PROMPT)])
    assert not channel.outputs(0)
    assert channel.outputs(1)[-1].finish_reason == "stop"
