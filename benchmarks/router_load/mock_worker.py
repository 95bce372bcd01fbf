"""A worker without a model, for every router alike: OpenAI's API over HTTP for those that speak HTTP to workers, Sapwood's gRPC
session for ours; the same simulated cache and the same times behind both.

It keeps an LRU set of block hashes (64 characters of text or 16 tokens a block; 4 characters are a token), of prompts and
answers. A request waits until those before it are prefilled, is prefilled for a base time and a time for each block that was
not held, and is answered with ``max_tokens`` words: at once, or one every ``--pace-ms`` (all running requests together, as a
scheduler steps). A prompt that begins with "idle" gets one word and no more, one that begins with "slow" a thousand at a
time, but none while its stream is paused. One process, one event loop; ``/stats`` tells what was asked and held, ``/reset``
empties the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import httptools
import msgspec
import uvloop
from router_load.mock_engine import BLOCK, MOST_HELD, WORD, Engine

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.errors import UnimplementedError
from sapwood_common.serving.server import ServiceServer

CHARACTERS_A_TOKEN = 4
WORD_TOKEN = 151_645
MODEL = "mock"
_NAME = "sapwood.v1.Worker"


class HttpConnection(asyncio.Protocol):
    """One connection of a router; requests on it come one after another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser: Any = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._path.partition(b"?")[0]
        if path in (b"/v1/completions", b"/v1/chat/completions", b"/generate"):
            self._generate(path, msgspec.json.decode(b"".join(self._body)))
        elif path == b"/stats":
            self._answer(self._engine.stats())
        elif path == b"/reset":
            self._engine.reset()
            self._answer({})
        elif path == b"/v1/models":
            self._answer({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "mock"}]})
        elif path.endswith(b"/render") or path == b"/tokenize":
            self._tokenize(msgspec.json.decode(b"".join(self._body)))
        else:  # /health, /get_model_info, /server_info and so on: whatever a router asks a worker about itself
            self._answer({"status": "ok", "model_path": MODEL, "served_model_name": MODEL, "is_generation": True})

    def _tokenize(self, request: dict[str, Any]) -> None:
        text = request.get("prompt") or _chat_text(request.get("messages", []))
        raw = text.encode()
        ids = [int.from_bytes(raw[at : at + 4].ljust(4), "little") for at in range(0, len(raw), CHARACTERS_A_TOKEN)]
        self._answer({"tokens": ids, "token_ids": ids, "prompt_token_ids": ids, "count": len(ids)})

    def _generate(self, path: bytes, request: dict[str, Any]) -> None:
        engine = self._engine
        engine.running += 1
        chat = path == b"/v1/chat/completions"
        text: str = _chat_text(request["messages"]) if chat else request.get("prompt") or request.get("text") or ""
        tokens: int = request.get("max_tokens") or request.get("max_completion_tokens") or 1
        prompt = text.encode()
        delay, held = engine.prefill(prompt, tokens)
        usage = {
            "prompt_tokens": len(prompt) // CHARACTERS_A_TOKEN,
            "completion_tokens": tokens,
            "total_tokens": len(prompt) // CHARACTERS_A_TOKEN + tokens,
            "prompt_tokens_details": {"cached_tokens": held * BLOCK // CHARACTERS_A_TOKEN},
        }
        head: dict[str, Any] = {"id": "x", "object": "text_completion", "created": 1, "model": MODEL}
        if not request.get("stream"):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
            said = WORD * tokens
            choice |= {"message": {"role": "assistant", "content": said}} if chat else {"text": said}

            def whole(count: int, last: bool) -> bool:
                if last:
                    engine.running -= 1
                    self._answer({**head, "choices": [choice], "usage": usage})
                return self._open

            engine.run(delay, tokens, whole)
            return
        delta = {"delta": {"content": WORD}} if chat else {"text": WORD}
        events = [
            b"data: "
            + msgspec.json.encode(
                {**head, "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **delta}]}
            )
            + b"\n\n"
            for reason in (None, "length")
        ]
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
        end = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        opening = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        begun = False

        def part(count: int, last: bool) -> bool:
            nonlocal begun
            if self._open and self._transport is not None:
                self._transport.write((b"" if begun else opening) + (chunks[1] + end if last else chunks[0]))
            begun = True
            if last or not self._open:
                engine.running -= 1
            return self._open

        engine.run(delay, tokens, part)

    def _answer(self, value: object) -> None:
        body = msgspec.json.encode(value)
        if self._open and self._transport is not None:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )


def _chat_text(messages: list[dict[str, Any]]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


class Session:
    """One router's session: what came since the last message was written goes out in the next."""

    def __init__(self, engine: Engine, answers: dict[int, list[int]]) -> None:
        self._engine = engine
        self._answers = answers
        self._ready: dict[int, worker_pb2.SessionOutput] = {}
        self._one_token: dict[int, int] = {}
        """Streams with one token and nothing else, where these go packed."""
        self._packs_tokens = False
        self._open: set[int] = set()
        self._paused: set[int] = set()
        self._wake = asyncio.Event()
        self._heartbeat = 0.2

    async def read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            if request.HasField("heartbeat_ms"):
                self._heartbeat = request.heartbeat_ms / 1000
                self._packs_tokens = request.packed_tokens
            for stream_id in request.aborts:
                self._end(stream_id)
                self._ready.pop(stream_id, None)
                self._one_token.pop(stream_id, None)
            self._paused |= set(request.pauses)
            self._paused -= set(request.resumes)
            for submit in request.submits:
                self._submit(submit)
            self._wake.set()

    def _end(self, stream_id: int) -> None:
        if stream_id in self._open:
            self._open.discard(stream_id)
            self._paused.discard(stream_id)
            self._engine.running -= 1

    def _submit(self, submit: worker_pb2.SessionSubmit) -> None:
        stream_id, asked = submit.stream_id, submit.request
        self._engine.running += 1
        self._open.add(stream_id)
        # A token is four characters of the text, so both edges see the same blocks.
        prompt = array("I", asked.token_ids[:MOST_HELD]).tobytes()
        delay, held = self._engine.prefill(prompt, asked.sampling.max_tokens, asked.tenant)
        cached, first = held * BLOCK // CHARACTERS_A_TOKEN, True
        answer, at = self._answers.get(asked.sampling.max_tokens), 0

        def emit(count: int, last: bool) -> bool:
            nonlocal first, at
            if stream_id not in self._open:
                return False
            if count > 1 and not last and stream_id in self._paused:
                return True  # nobody waits for these: kept, they would come in one message of millions
            self._wake.set()
            tokens = [WORD_TOKEN] * count if answer is None else answer[at : at + count]
            at += count
            output = self._ready.get(stream_id)
            if output is None:
                if stream_id in self._one_token:
                    tokens.insert(0, self._one_token.pop(stream_id))
                elif self._packs_tokens and count == 1 and not first and not last:
                    self._one_token[stream_id] = tokens[0]
                    return True
                output = self._ready[stream_id] = worker_pb2.SessionOutput(stream_id=stream_id)
            output.response.token_ids.extend(tokens)
            if first:
                first = False
                output.response.usage.cached_tokens = cached
            if last:
                output.response.finish_reason = common_pb2.FINISH_REASON_LENGTH
                output.response.usage.cached_tokens = cached
                output.response.usage.prompt_tokens = len(asked.token_ids)
                output.response.usage.completion_tokens = asked.sampling.max_tokens
                self._end(stream_id)
            return True

        self._engine.run(delay, asked.sampling.max_tokens, emit, prompt, together=True)

    async def next_response(self) -> worker_pb2.SessionResponse:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat):
                await self._wake.wait()
        self._wake.clear()
        taken = [stream_id for stream_id in self._ready if stream_id not in self._paused]
        outputs = [self._ready.pop(stream_id) for stream_id in taken]
        packed = [stream_id for stream_id in self._one_token if stream_id not in self._paused]
        tokens = [self._one_token.pop(stream_id) for stream_id in packed]
        return worker_pb2.SessionResponse(outputs=outputs, token_streams=packed, tokens=tokens)

    def close(self) -> None:
        for stream_id in tuple(self._open):
            self._end(stream_id)


class MockWorker(worker_pb2_grpc.WorkerServicer):
    """The gRPC edge."""

    def __init__(
        self, engine: Engine, blocks: int, max_running: int, epoch: int, answers: dict[int, list[int]]
    ) -> None:
        self._engine, self._blocks, self._max_running, self._epoch = engine, blocks, max_running, epoch
        self._answers = answers

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        session = Session(self._engine, self._answers)
        reader = asyncio.ensure_future(session.read(request_iterator))
        try:
            yield worker_pb2.SessionResponse(info=await self.GetModelInfo(worker_pb2.GetModelInfoRequest(), context))
            while not reader.done():
                yield await session.next_response()
        finally:
            reader.cancel()
            session.close()

    async def Generate(  # noqa: N802
        self, request: worker_pb2.WorkerGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        prompt = array("I", request.token_ids[:]).tobytes()
        delay, _ = self._engine.prefill(prompt, request.sampling.max_tokens)
        ready: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

        def emit(count: int, last: bool) -> bool:
            ready.put_nowait((count, last))
            return True

        self._engine.run(delay, request.sampling.max_tokens, emit, prompt)
        last = False
        while not last:
            count, last = await ready.get()
            yield worker_pb2.WorkerGenerateResponse(
                token_ids=[WORD_TOKEN] * count, finish_reason=common_pb2.FINISH_REASON_LENGTH if last else 0
            )

    async def GetModelInfo(  # noqa: N802
        self, request: worker_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetModelInfoResponse:
        return worker_pb2.GetModelInfoResponse(
            model=MODEL,
            context_length=1_000_000,
            vocab_size=2**32 - 1,
            page_size=BLOCK // CHARACTERS_A_TOKEN,
            num_pages=self._blocks,
            epoch=self._epoch,
            max_running=self._max_running,
        )

    async def SubscribeKvEvents(  # noqa: N802
        self, request: worker_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        raise UnimplementedError("this worker publishes no KV events")
        yield worker_pb2.SubscribeKvEventsResponse()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--base-ms", type=float, default=0.0)
    parser.add_argument("--block-us", type=float, default=0.0)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--answers", type=Path, help="JSON: lists of tokens; one answers requests for so many tokens")
    args = parser.parse_args()
    answers = [] if args.answers is None else json.loads(args.answers.read_text())
    engine = Engine(args.blocks, args.base_ms / 1000, args.block_us / 1e6, args.pace_ms / 1000)
    server = ServiceServer("127.0.0.1", args.grpc_port, [_NAME], uncounted=frozenset({f"/{_NAME}/Session"}))
    worker_pb2_grpc.add_WorkerServicer_to_server(
        MockWorker(engine, args.blocks, args.max_running, args.epoch, {len(ids): ids for ids in answers}), server.grpc
    )
    await server.start()
    await server.set_serving(True)
    http = await asyncio.get_running_loop().create_server(
        lambda: HttpConnection(engine), "127.0.0.1", args.http_port, backlog=4096
    )
    await http.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
