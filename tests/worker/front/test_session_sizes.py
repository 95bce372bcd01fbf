"""A session's messages stay within what may be sent, however many log probabilities there are: its streams share its fate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.network.channel import MAX_MESSAGE_BYTES
from sapwood_common.status import code_number
from sapwood_worker.front.generation import Generation
from sapwood_worker.front.session import Session
from sapwood_worker.ipc.vitals import Vitals
from sapwood_worker.records.output import RequestOutput, TokenLogprobs

TOKEN = TokenLogprobs(-1.0, [50_000 + number for number in range(20)], [-2.0] * 20)


async def messages(prompts: Sequence[int]) -> list[worker_pb2.SessionResponse]:
    """What a session sends whose streams have scored prompts of so many tokens, each in the same step."""
    generations = [Generation(f"r{number}", 1, lambda _: None) for number in range(len(prompts))]
    begun = iter(generations)

    async def begin(request: worker_pb2.WorkerGenerateRequest, seconds: float | None) -> Generation:
        return next(begun)

    async def requests():
        yield worker_pb2.SessionRequest(
            submits=[worker_pb2.SessionSubmit(stream_id=number) for number in range(len(prompts))]
        )
        await asyncio.Event().wait()

    engine = SimpleNamespace(load_version=-1, vitals=Vitals())
    session = Session(begin, engine, worker_pb2.GetModelInfoResponse(), lambda: 0, asyncio.Event(), lambda: None)
    responses = session.responses(requests())
    sent = [await anext(responses)]
    for _ in range(10):  # all have begun
        await asyncio.sleep(0)
    for number, (generation, tokens) in enumerate(zip(generations, prompts, strict=True)):
        generation.put(0, RequestOutput(number, [7], "length", tokens, 1, 0, prompt_logprobs=[TOKEN] * tokens))
    while not session.idle:
        sent.append(await anext(responses))
    await responses.aclose()
    return sent


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
