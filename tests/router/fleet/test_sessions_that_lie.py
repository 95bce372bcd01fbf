"""Messages of a worker's session that are lost, come twice or in another order: no client gets a wrong answer by it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence

import pytest

from sapwood.v1 import common_pb2, worker_pb2

Session = worker_pb2.SessionResponse
TEXT = "abcdefghijklmnopqrstuvwxyz"


def has_tokens(message: Session) -> bool:
    return bool(message.tokens) or any(output.response.token_ids for output in message.outputs)


class Mangled:
    """Does something with the messages that have tokens, from the fourth on, once."""

    def __init__(self, change: Callable[[Session, Session], Sequence[Session]]) -> None:
        self._change = change
        self._numbers = itertools.count()
        self._held: Session | None = None
        self.changed = False

    def __call__(self, message: Session) -> Sequence[Session]:
        if self.changed or not has_tokens(message) or next(self._numbers) < 4:
            return (message,)
        if self._held is None:
            self._held = message
            return ()
        self.changed = True
        return self._change(self._held, message)


CHANGES: dict[str, Callable[[Session, Session], Sequence[Session]]] = {
    "lost": lambda one, other: (other,),
    "doubled": lambda one, other: (one, one, other),
    "swapped": lambda one, other: (other, one),
}


def answers_slowly(fake) -> None:
    """An answer repeats the prompt, a token a message, and continues where an earlier try ended."""
    fake.script.tokens = lambda prompt: prompt[1 : len(TEXT) + 1][len(prompt) - len(TEXT) - 1 :]
    fake.script.delay = 0.01
    fake.script.reason = common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_message_that_is_not_the_next_ends_in_a_resume(make_cluster, packed: bool, change: str) -> None:
    async with make_cluster(2) as cluster:
        mangled = Mangled(CHANGES[change])
        for fake in cluster.workers:
            answers_slowly(fake)
            fake.packs_tokens, fake.mangle = packed, mangled
        responses = await cluster.generate(TEXT)
        assert "".join(response.text for response in responses) == TEXT
        assert mangled.changed
        assert sum(len(fake.calls) for fake in cluster.workers) == 2, "it was resumed"


@pytest.mark.parametrize("told", [True, False])
async def test_an_end_that_comes_before_its_last_token_is_not_handed_out(make_cluster, told: bool) -> None:
    """A worker says that it has come to the limit with all tokens, one of which has not come; older ones say no position."""

    changed: list[bool] = []

    def mangle(message: Session) -> Sequence[Session]:
        for output in message.outputs:
            if output.response.finish_reason and not changed:
                changed.append(True)
                del output.response.token_ids[:]
                output.response.position += 1
                if not told:
                    output.response.ClearField("position")
        return (message,)

    async with make_cluster(2) as cluster:
        for fake in cluster.workers:
            answers_slowly(fake)
            fake.mangle = mangle
        responses = await cluster.generate(TEXT)
        assert "".join(response.text for response in responses) == TEXT
        assert changed
        assert sum(len(fake.calls) for fake in cluster.workers) == 2


async def test_workers_that_say_no_positions_are_believed(make_cluster) -> None:
    def mangle(message: Session) -> Sequence[Session]:
        message.ClearField("positions")
        for output in message.outputs:
            output.response.ClearField("position")
        return (message,)

    async with make_cluster(1) as cluster:
        (fake,) = cluster.workers
        answers_slowly(fake)
        fake.mangle = mangle
        for number in range(3):
            responses = await cluster.generate(TEXT)
            assert "".join(response.text for response in responses) == TEXT, number
        assert len(fake.calls) == 3


@pytest.mark.parametrize("how", ["killed", "wrong message"])
async def test_the_log_and_the_503_say_why_a_worker_was_lost(
    make_cluster, wait_until, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.INFO)
    async with make_cluster(1, resume_grace=0.0, most_resumptions=0) as cluster:
        (fake,) = cluster.workers
        answers_slowly(fake)
        fake.script.gate = asyncio.Event()
        asked = asyncio.ensure_future(cluster.http.post("/v1/completions", json={"prompt": TEXT}))
        await wait_until(lambda: bool(fake.calls))
        if how == "killed":
            await fake.kill()
        else:
            fake.mangle = lambda message: (Session(token_streams=[1, 2], tokens=[1]),)
        answer = await asked
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        found = [record.getMessage() for record in caplog.records if "is down" in record.getMessage()]
        for text in (message, *found):
            assert "closed here" not in text
        assert found and (how == "killed" or "ValueError" in found[0])


HOSTILE = [0, 1, 2, 5, 26, 2**31, 2**32 - 1]
BYTES = [97, 98, 200]
"""Tokens that the tokenizer of these tests has."""


def scrambled(message: Session, chance: random.Random) -> Session:
    """A message in which positions, tokens, ids of streams and how many there are of each are what chance says."""
    found = Session()
    found.CopyFrom(message)
    for field, values in ((found.positions, HOSTILE), (found.token_streams, HOSTILE), (found.tokens, BYTES)):
        match chance.randrange(5):
            case 0 if field:
                field[chance.randrange(len(field))] = chance.choice(values)
            case 1:
                field.append(chance.choice(values))
            case 2 if field:
                del field[chance.randrange(len(field))]
            case 3:
                field.extend(chance.choice(values) for _ in range(1000))
    for output in found.outputs:
        match chance.randrange(6):
            case 0:
                output.response.position = chance.choice(HOSTILE)
            case 1:
                output.response.token_ids.append(chance.choice(BYTES))
            case 2:
                output.stream_id = chance.choice(HOSTILE)
            case 3:
                output.response.usage.completion_tokens = chance.choice(HOSTILE)
            case 4:
                output.response.finish_reason = chance.choice([0, 1, 2, 3, 99])
    return found


@pytest.mark.parametrize("packed", [True, False])
async def test_a_worker_that_says_anything_stops_nobody_at_another(make_cluster, packed: bool) -> None:
    """What its own clients get may be wrong or an error; the router continues, and streams at the honest worker are right."""
    chance = random.Random(packed)
    async with make_cluster(2, most_resumptions=20) as cluster:
        for fake in cluster.workers:
            answers_slowly(fake)
            fake.packs_tokens, fake.script.delay = packed, 0.001
        liar, honest = cluster.workers
        liar.mangle = lambda message: (scrambled(message, chance),)
        for _ in range(20):
            asked = [cluster.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 26}) for _ in range(3)]
            for answer in await asyncio.gather(*asked):
                assert answer.status_code < 600
                answer.json()
        liar.mangle = lambda message: (message,)
        await liar.kill()
        for _ in range(5):
            responses = await cluster.generate(TEXT)
            assert "".join(response.text for response in responses) == TEXT
        assert honest.calls
