"""Prompts encoded over one call to each replica of the tokenizer; what a loss costs is a pause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from sapwood.v1 import tokenizer_pb2
from sapwood_common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from sapwood_common.network.channel import Dialer
from sapwood_router.request.context import ChatPrompt, Turn
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.replica import TokenizerReplica
from sapwood_testing.router.fake_tokenizer import FakeTokenizer, encode

PATIENCE = 60.0


class Tokenizer(FakeTokenizer):
    """One that can be made to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = self.held = 0
        self.sizes: list[int] = []
        """How many items each message had."""

    async def Tokenize(self, request, context):  # noqa: N802 - the method of the protocol
        self.asked += 1
        self.held += 1
        try:
            await self.gate.wait()
        finally:
            self.held -= 1
        if request.texts[0] == "full":
            raise ResourceExhaustedError("too many", retry_after=1.5)
        return await super().Tokenize(request, context)

    def Encode(self, request_iterator, context):  # noqa: N802 - the method of the protocol
        async def counted():
            async for request in request_iterator:
                self.sizes.append(len(request.items))
                yield request

        return super().Encode(counted(), context)


class OldTokenizer(FakeTokenizer):
    """One that does not know the method."""

    async def Encode(self, request_iterator, context):  # noqa: N802 - the method of the protocol
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield


@contextlib.asynccontextmanager
async def client_of(wait_until, *fakes: FakeTokenizer, up: bool = True) -> AsyncIterator[Client]:
    for fake in fakes:
        await fake.start()
    replicas = [TokenizerReplica(fake.address, Dialer(), lambda: None) for fake in fakes]
    tasks = [asyncio.ensure_future(replica.monitor(0.05, lambda: None)) for replica in replicas]
    sessions = [asyncio.ensure_future(replica.encodings.run()) for replica in replicas]
    tasks += sessions
    try:
        await wait_until(lambda: all(r.problem is None and r.encodings.up == up for r in replicas))
        yield Client(replicas, sessions)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in replicas:
            await replica.channel.close()
        for fake in fakes:
            await fake.kill()


class Client:
    def __init__(self, replicas: list[TokenizerReplica], sessions: list[asyncio.Future[None]]) -> None:
        self.replicas = replicas
        self.sessions = sessions
        self.client = TokenizerClient(lambda: self.replicas, PATIENCE)

    def text(self, text: str, seconds: float = PATIENCE) -> asyncio.Future[list[int]]:
        deadline = asyncio.get_running_loop().time() + seconds
        return asyncio.ensure_future(self.client.encode_text(text, f"id-{len(text)}", deadline))

    async def chat(self, *roles: str) -> list[int]:
        prompt = ChatPrompt(turns=tuple(Turn(role=role, content="hi") for role in roles))
        deadline = asyncio.get_running_loop().time() + PATIENCE
        return (await self.client.encode_chat(prompt, "chat", deadline)).token_ids


async def test_prompts_of_one_moment_go_in_one_message_and_each_gets_its_own(wait_until) -> None:
    fake = Tokenizer()
    async with client_of(wait_until, fake) as client:
        texts = ["a" * n for n in range(1, 40)]
        answers = await asyncio.gather(client.chat("system", "user"), *map(client.text, texts))
        assert answers == [encode("<system>hi<user>hi<assistant>"), *map(encode, texts)]
        assert fake.sizes == [40]
        assert set(fake.request_ids) == {"chat", *(f"id-{n}" for n in range(1, 40))}
        assert client.replicas[0].load == 0


async def test_a_prompt_at_fault_fails_alone_with_its_field_and_its_delay(wait_until) -> None:
    async with client_of(wait_until, Tokenizer()) as client:
        good, bad, full = await asyncio.gather(
            client.text("abc"), client.chat("user", "system"), client.text("full"), return_exceptions=True
        )
        assert good == encode("abc")
        assert isinstance(bad, InvalidArgumentError) and bad.field == "messages[1].role"
        assert isinstance(full, ResourceExhaustedError) and full.retry_after == 1.5


async def test_what_a_replica_had_when_it_was_killed_is_answered_by_another(wait_until) -> None:
    fakes = [Tokenizer(), Tokenizer()]
    async with client_of(wait_until, *fakes) as client:
        for fake in fakes:
            fake.gate.clear()
        answers = [client.text(f"text {n}") for n in range(10)]
        await wait_until(lambda: [fake.held for fake in fakes] == [5, 5])
        assert [replica.load for replica in client.replicas] == [5, 5]
        await fakes[0].kill()
        await wait_until(lambda: fakes[1].held == 10)
        fakes[1].gate.set()
        assert await asyncio.gather(*answers) == [encode(f"text {n}") for n in range(10)]


async def test_a_replica_that_restarts_or_hangs_costs_a_pause(wait_until) -> None:
    fake = Tokenizer()
    async with client_of(wait_until, fake) as client:
        fake.gate.clear()
        answers = [client.text(f"text {n}") for n in range(4)]
        await wait_until(lambda: fake.held == 4)
        await fake.kill()
        fake.gate.set()
        await fake.start()
        assert await asyncio.gather(*answers) == [encode(f"text {n}") for n in range(4)]
        session = client.replicas[0].encodings
        await wait_until(lambda: session.up)
        fake.gate.clear()
        answer = client.text("again")
        await wait_until(lambda: fake.held == 1)
        asked = fake.asked
        session.abandon("health checks time out")  # as the monitor says
        await wait_until(lambda: fake.asked > asked)
        fake.gate.set()
        assert await answer == encode("again")


async def test_a_deadline_and_a_client_that_leaves_end_the_item_at_the_tokenizer_too(wait_until) -> None:
    fake = Tokenizer()
    async with client_of(wait_until, fake) as client:
        fake.gate.clear()
        late, left, stays = client.text("late", 0.2), client.text("left"), client.text("stays")
        with pytest.raises(DeadlineExceededError):
            await late
        left.cancel()
        await wait_until(lambda: fake.held == 1)
        fake.gate.set()
        assert await stays == encode("stays")


async def test_a_tokenizer_that_does_not_know_the_method_is_called(wait_until) -> None:
    async with client_of(wait_until, OldTokenizer(), up=False) as client:
        assert await client.text("abc") == encode("abc")
        assert await client.chat("user") == encode("<user>hi<assistant>")


async def test_a_long_prompt_goes_in_a_call_of_its_own(wait_until) -> None:
    fake = Tokenizer()
    async with client_of(wait_until, fake) as client:
        assert list(await client.text("long " * 60_000)) == encode("long " * 60_000)
        assert fake.sizes == []


async def test_a_replica_that_leaves_answers_what_it_has(wait_until) -> None:
    fake = Tokenizer()
    async with client_of(wait_until, fake) as client:
        (replica,) = client.replicas
        fake.gate.clear()
        answer = client.text("abc")
        await wait_until(lambda: fake.held == 1)
        client.replicas = []
        replica.encodings.finish()
        assert not replica.encodings.up
        fake.gate.set()
        assert await answer == encode("abc")
        deadline = asyncio.get_running_loop().time() + PATIENCE
        with pytest.raises(UnavailableError):
            await TokenizerClient(list, 0.2).encode_text("x", "id", deadline)


async def test_a_session_that_is_stopped_leaves_nobody_waiting(wait_until) -> None:
    fake = Tokenizer()
    async with client_of(wait_until, fake) as client:
        session = client.replicas[0].encodings
        fake.gate.clear()
        deadline = asyncio.get_running_loop().time() + PATIENCE
        item = tokenizer_pb2.EncodeItem(tokenize=tokenizer_pb2.TokenizeRequest(texts=["abc"]))
        asked = asyncio.ensure_future(session.ask(item, deadline))
        await wait_until(lambda: fake.held == 1)
        client.sessions[0].cancel()
        with pytest.raises(UnavailableError):
            await asked
        assert (session.up, session.load) == (False, 0)
