"""Twenty requests of every kind of setting, their answers, and whether two runs gave the same: for tests of drafts."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.source import GrammarKind, GrammarOptions, GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.grammar.llguidance import GrammarStore
from sapwood_worker.records.output import RequestOutput
from sapwood_worker.records.step import LaunchedStep, Runner

VOCAB = 97
TOKENS = 24
VOCABULARY = TokenVocabulary(
    (b"<end>", b"<a>", b"<b>", *(bytes([code]) for code in range(32, 126))), frozenset({0, 1, 2})
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "age", "on"],
    "additionalProperties": False,
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"logit_bias": {5: 4.0, 9: -50.0}},
    {"min_tokens": 9, "stop_token_ids": tuple(range(40, 60)), "ignore_eos": False},
    {"allowed_token_ids": tuple(range(10, 50))},
    {"temperature": 0.3, "bad_words_ids": ((7,), (8, 9), (3, 4, 5))},
    {"logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 2},
    {"max_tokens": 1},
]

Answers = dict[int, list[RequestOutput]]


def prompts() -> list[list[int]]:
    """20, most with a common beginning."""
    chance = random.Random(3)
    shared = [chance.randrange(3, VOCAB) for _ in range(40)]
    return [
        shared[: chance.choice([0, 7, 20, 40])] + [chance.randrange(3, VOCAB) for _ in range(1 + at % 5)]
        for at in range(20)
    ]


def compiled(kind: GrammarKind, source: str) -> bytes:
    """A grammar as a worker gets it."""
    given = GrammarSource(kind, source, GrammarOptions())
    lark = GrammarBuilder(VOCABULARY.special_names).compile(given)
    return GrammarArtefact.of(given, VOCABULARY.fingerprint, lark).to_bytes()


GRAMMARS = [
    compiled("regex", "[a-c]{4,9}=[0-9]{3}(xyz|zyx)"),
    compiled("json_schema", json.dumps(SCHEMA)),
]


def requests(store: GrammarStore) -> list[Request]:
    """Each setting, then grammars, each with a prompt and a seed of its own."""
    found = []
    for serial, prompt in enumerate(prompts()):
        settings = {"seed": serial, "max_tokens": TOKENS, "ignore_eos": True} | SETTINGS[serial % len(SETTINGS)]
        grammar = None
        if serial >= 14:
            settings = {"seed": serial, "max_tokens": 60, "temperature": serial % 2}
            grammar = store.build(GRAMMARS[serial // 2 % 2])
        found.append(Request(serial, f"r{serial}", prompt, SamplingParams(**settings), grammar=grammar))
    return found


def drive(scheduler: Scheduler, runner: Runner, overlap: bool) -> Iterator[RequestOutput]:
    """Runs steps as the event loop does, until all requests have ended; yields their outputs."""
    launched: deque[LaunchedStep] = deque()
    while scheduler.has_work:
        if not scheduler.plans_ahead:
            yield from scheduler.update(launched.popleft().result())
            while launched:
                yield from scheduler.update(launched.popleft().result())
        planned = scheduler.schedule()
        if planned:
            launched.append(runner.launch(planned))
        while len(launched) > (1 if planned and overlap else 0):
            yield from scheduler.update(launched.popleft().result())
        scheduler.check()


def run(
    scheduler: Scheduler,
    runner: Runner,
    overlap: bool,
    asked: list[Request],
    stops: Mapping[int, bytes] | None = None,
) -> Answers:
    """What each request got. Some are aborted, as a router does it, once their text has their stop string of ``stops``."""
    answers: Answers = {request.serial: [] for request in asked}
    for request in asked:
        scheduler.add(request)
    for output in drive(scheduler, runner, overlap):
        answers[output.serial].append(output)
        if (
            stops
            and output.finish_reason is None
            and stops.get(output.serial, b"\0") in text_of(answers[output.serial])
        ):
            scheduler.abort(output.serial)
    return answers


def text_of(outputs: list[RequestOutput]) -> bytes:
    """The text of an answer."""
    return b"".join(VOCABULARY.tokens[token] for token in tokens_of(outputs))


STOPPED = (1, 2, 5, 13)
"""Requests of the twenty that have a stop string in some tests."""


def stop_strings(expected: Answers) -> dict[int, bytes]:
    """Stop strings from the midst of some answers."""
    return {serial: text_of(expected[serial])[9:12] for serial in STOPPED if serial in expected}


def assert_stopped(found: Answers, expected: Answers, stops: Mapping[int, bytes]) -> None:
    """Asserts that texts go up to their stop strings, and that some end before all tokens came; takes them from ``found``."""
    shorter = 0
    for serial, stop in stops.items():
        outputs, text = found.pop(serial), text_of(expected[serial])
        assert text_of(outputs)[: text.index(stop) + len(stop)] == text[: text.index(stop) + len(stop)], f"r{serial}"
        shorter += len(text_of(outputs)) < len(text)
    assert shorter


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """The tokens of an answer."""
    return [token for output in outputs for token in output.token_ids]


def assert_alike(found: Answers, expected: Answers, stopped: Collection[int] = ()) -> None:
    """Asserts that tokens, ends and log probabilities are the same, the last within a float's tolerance."""
    assert found.keys() == expected.keys() - stopped
    for serial, outputs in found.items():
        others = expected[serial]
        assert tokens_of(outputs) == tokens_of(others), f"r{serial}"
        assert (outputs[-1].finish_reason, outputs[-1].error) == (others[-1].finish_reason, others[-1].error)
        assert outputs[-1].completion_tokens == others[-1].completion_tokens
        for kind in ("logprobs", "prompt_logprobs"):
            mine, theirs = ([each for item in got for each in getattr(item, kind)] for got in (outputs, others))
            assert len(mine) == len(theirs)
            for one, other in zip(mine, theirs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)
