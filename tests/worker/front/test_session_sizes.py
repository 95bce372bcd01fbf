"""A session's messages stay within what may be sent, however many log probabilities there are: its streams share its fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import numpy as np

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.network.channel import MAX_MESSAGE_BYTES
from sapwood_common.status import code_number
from sapwood_testing.worker.no_loras import no_loras
from sapwood_worker.front.engine import Generation
from sapwood_worker.front.session import Session
from sapwood_worker.ipc.liveness import Liveness
from sapwood_worker.records.output import RequestOutput, TokenLogprobs

WIDTH = 1024
TOKEN = TokenLogprobs(-1.0, [50_000 + number for number in range(20)], [-2.0] * 20)


class Sessions:
    """A session whose streams the test answers itself. Stream n is the n-th of ``generations``; embeddings are counted up."""

    def __init__(self, count: int) -> None:
        self.generations = [Generation(f"r{number}", 1, lambda _: None) for number in range(count)]
        self._begun = iter(self.generations)
        engine = SimpleNamespace(load_version=-1, liveness=Liveness())
        info = worker_pb2.GetModelInfoResponse()
        self.session = Session(
            self._begin,
            self._embed,
            engine,
            lambda: info,
            lambda: 0,
            asyncio.Event(),
            lambda: None,  # type: ignore[arg-type]
            no_loras(),
        )

    async def _begin(self, request: worker_pb2.WorkerGenerateRequest, seconds: float | None) -> Generation:
        return next(self._begun)

    async def _embed(self, request: worker_pb2.WorkerEmbedRequest, seconds: float | None) -> tuple[np.ndarray, int]:
        count = len(request.inputs)
        return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH), count

    def responses(self, *submits: worker_pb2.SessionSubmit) -> AsyncIterator[worker_pb2.SessionResponse]:
        async def requests() -> AsyncIterator[worker_pb2.SessionRequest]:
            yield worker_pb2.SessionRequest(submits=submits)
            await asyncio.Event().wait()

        return self.session.responses(requests())


async def all_begun() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def messages(prompts: Sequence[int]) -> list[worker_pb2.SessionResponse]:
    """What a session sends whose streams have scored prompts of so many tokens, each in the same step."""
    sessions = Sessions(len(prompts))
    responses = sessions.responses(*(worker_pb2.SessionSubmit(stream_id=number) for number in range(len(prompts))))
    sent = [await anext(responses)]
    await all_begun()
    for number, (generation, tokens) in enumerate(zip(sessions.generations, prompts, strict=True)):
        generation.put(0, RequestOutput(number, [7], "length", tokens, 1, 0, prompt_logprobs=[TOKEN] * tokens))
    while not sessions.session.idle:
        sent.append(await anext(responses))
    await responses.aclose()  # type: ignore[attr-defined]
    return sent


async def test_vectors_go_in_parts_that_others_tokens_overtake() -> None:
    sessions = Sessions(1)
    inputs = [common_pb2.TokenIds(ids=[1])] * 2048
    submits = [worker_pb2.SessionSubmit(stream_id=0)]
    submits += [worker_pb2.SessionSubmit(stream_id=n, embed={"inputs": inputs}) for n in (1, 2, 3)]
    responses = sessions.responses(*submits)
    await anext(responses)
    await all_begun()
    found: dict[int, list[float]] = {}
    ended: list[int] = []
    overtaken = 0
    while not sessions.session.idle:
        if not sessions.generations[0].ended:
            reason = "length" if overtaken == 5 else None
            sessions.generations[0].put(0, RequestOutput(0, [7], reason, 1, overtaken + 1))  # type: ignore[arg-type]
        message = await anext(responses)
        assert message.ByteSize() < 3 << 20
        for output in message.outputs:
            if output.stream_id == 0:
                overtaken += len(ended) < 3
                continue
            assert output.stream_id not in ended
            found.setdefault(output.stream_id, []).extend(each.values[0] for each in output.embeddings.embeddings)
            if output.embeddings.prompt_tokens:
                ended.append(output.stream_id)
                assert output.embeddings.prompt_tokens == 2048
    await responses.aclose()  # type: ignore[attr-defined]
    assert found == {key: [float(number * WIDTH) for number in range(2048)] for key in (1, 2, 3)}
    assert overtaken == 6, "a token came with each message"


async def test_what_one_message_cannot_hold_goes_in_several() -> None:
    sent = await messages([60_000] * 9)
    assert sum(message.ByteSize() for message in sent) > MAX_MESSAGE_BYTES
    assert max(message.ByteSize() for message in sent) < MAX_MESSAGE_BYTES / 2
    outputs = [output for message in sent for output in message.outputs]
    assert [output.stream_id for output in outputs] == list(range(9))
    assert all(len(output.response.prompt_logprobs) == 60_000 for output in outputs)


async def test_a_stream_with_more_than_a_message_fails_alone() -> None:
    sent = await messages([400_000, 3])
    outputs = [output for message in sent for output in message.outputs]
    assert [output.error.code for output in outputs] == [code_number(InvalidArgumentError("")), 0]
    assert outputs[0].error.field == "sampling.prompt_logprobs"
    assert len(outputs[1].response.prompt_logprobs) == 3
