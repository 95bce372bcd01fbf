"""Many requests' texts and conversations over one Encode call."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from prometheus_client import generate_latest

from sapwood.v1 import common_pb2, tokenizer_pb2
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.telemetry.logs import request_id_var, traceparent_var
from sapwood_common.telemetry.metrics import MetricSet
from sapwood_common.telemetry.tracing import Tracing
from sapwood_tokenizer.serve import encode_call
from sapwood_tokenizer.serve.encode_call import EncodeCall

PATIENCE = 60
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


class Call:
    """An Encode call without a network; a text is its length in tokens, and some have to wait."""

    def __init__(self) -> None:
        self.metrics = MetricSet()
        self.draining = asyncio.Event()
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.running: list[str] = []
        self.seen: dict[str, tuple[str, str | None]] = {}
        self.read = 0
        self._requests: asyncio.Queue[tokenizer_pb2.EncodeRequest | None] = asyncio.Queue()
        telemetry = RpcTelemetry(self.metrics, Tracing())
        call = EncodeCall(self._tokenize, self._apply, telemetry, self.draining)
        self.responses = call.answer(self._stream())

    async def __aenter__(self) -> "Call":
        assert not (await anext(self.responses)).results, "it says that it stands"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.responses.aclose()

    def send(self, *items: tokenizer_pb2.EncodeItem) -> None:
        self._requests.put_nowait(tokenizer_pb2.EncodeRequest(items=items))

    def end(self) -> None:
        self._requests.put_nowait(None)

    async def next(self) -> dict[int, tokenizer_pb2.EncodeResult]:
        response = await asyncio.wait_for(anext(self.responses), PATIENCE)
        return {result.id: result for result in response.results}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.001)

    def count(self, method: str, code: str) -> float:
        labels = {"method": f"/sapwood.v1.Tokenizer/{method}", "code": code}
        return self.metrics.registry.get_sample_value("sapwood_rpc_calls_total", labels) or 0

    async def _stream(self) -> AsyncIterator[tokenizer_pb2.EncodeRequest]:
        while (request := await self._requests.get()) is not None:
            self.read += 1
            yield request

    async def _tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> tokenizer_pb2.TokenizeResponse:
        (text,) = request.texts
        self.running.append(text)
        self.seen[text] = (request_id_var.get(), traceparent_var.get())
        try:
            if text in self.gates:
                await self.gates[text].wait()
            if text in self.errors:
                raise self.errors[text]
        finally:
            self.running.remove(text)
        return tokenizer_pb2.TokenizeResponse(sequences=[common_pb2.TokenIds(ids=range(len(text)))])

    async def _apply(self, request: tokenizer_pb2.ApplyChatTemplateRequest) -> tokenizer_pb2.ApplyChatTemplateResponse:
        return tokenizer_pb2.ApplyChatTemplateResponse(text=request.messages[0].content)


def text(item_id: int, what: str, **fields: object) -> tokenizer_pb2.EncodeItem:
    work = tokenizer_pb2.TokenizeRequest(texts=[what])
    return tokenizer_pb2.EncodeItem(id=item_id, tokenize=work, **fields)  # type: ignore[arg-type]


def chat(item_id: int, what: str) -> tokenizer_pb2.EncodeItem:
    work = tokenizer_pb2.ApplyChatTemplateRequest(messages=[common_pb2.ChatMessage(role="user", content=what)])
    return tokenizer_pb2.EncodeItem(id=item_id, apply_chat_template=work)


def ids(result: tokenizer_pb2.EncodeResult) -> list[int]:
    return list(result.tokenize.sequences[0].ids)


async def test_what_is_ready_leaves_together_and_waits_for_nothing_slower() -> None:
    async with Call() as call:
        call.gates["slow"] = call.gates["b"] = call.gates["c"] = asyncio.Event()
        call.gates["slow"] = asyncio.Event()
        named = text(2, "b", request_id="req-2", traceparent=TRACEPARENT)
        call.send(text(1, "slow"), named, text(3, "c", request_id="no id of\nours"), chat(4, "hello"))
        first = await call.next()
        assert first[4].apply_chat_template.text == "hello"
        call.gates["b"].set()
        both = await call.next()
        assert {item_id: ids(result) for item_id, result in both.items()} == {2: [0], 3: [0]}
        assert call.seen["b"] == ("req-2", TRACEPARENT)
        assert call.seen["c"] == ("-", None)
        call.gates["slow"].set()
        assert ids((await call.next())[1]) == [0, 1, 2, 3]
        call.end()
        with pytest.raises(StopAsyncIteration):
            await call.next()
        assert (call.count("Tokenize", "OK"), call.count("ApplyChatTemplate", "OK")) == (3, 1)
        assert b'sapwood_rpc_running{method="/sapwood.v1.Tokenizer/Tokenize"} 0.0' in generate_latest(
            call.metrics.registry
        )


async def test_an_item_fails_alone_and_as_a_call_of_its_own_would() -> None:
    async with Call() as call:
        call.errors = {
            "long": InvalidArgumentError("too long", field="texts[0]"),
            "full": ResourceExhaustedError("too many", retry_after=1.5),
            "bug": ZeroDivisionError(),
        }
        call.send(*(text(n, what) for n, what in enumerate(("long", "full", "bug", "well"))))
        call.send(tokenizer_pb2.EncodeItem(id=9))
        found: dict[int, tokenizer_pb2.EncodeResult] = {}
        while len(found) < 5:
            found |= await call.next()
        errors = {
            n: (result.error.code, result.error.field, result.error.retry_after_ms) for n, result in found.items()
        }
        assert errors == {
            0: (3, "texts[0]", 0),
            1: (8, "", 1500),
            2: (13, "", 0),
            3: (0, "", 0),
            9: (3, "items.work", 0),
        }
        assert ids(found[3]) == [0, 1, 2, 3]
        assert [call.count("Tokenize", code) for code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL")] == [
            1,
            1,
            1,
        ]


async def test_an_item_that_is_cancelled_or_late_ends_and_the_others_go_on() -> None:
    async with Call() as call:
        call.gates = {name: asyncio.Event() for name in ("left", "late")}
        call.send(text(1, "left"), text(2, "late", timeout_ms=1))
        late = await call.next()
        assert (late[2].error.code, late.keys()) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], {2})
        call.send(tokenizer_pb2.EncodeItem(id=1, cancel=True), tokenizer_pb2.EncodeItem(id=7, cancel=True))
        call.send(text(3, "c", timeout_ms=10**9))
        assert (await call.next()).keys() == {3}
        await call.until(lambda: not call.running)
        assert call.count("Tokenize", "CANCELLED") == 2
        call.send(text(4, "left"), text(4, "left"))
        with pytest.raises(InvalidArgumentError, match="under way"):
            await call.next()
        await call.until(lambda: not call.running)


async def test_a_draining_service_finishes_running_calls_and_refuses_new_ones() -> None:
    async with Call() as call:
        call.gates["slow"] = asyncio.Event()
        call.send(text(1, "slow"))
        await call.until(lambda: call.running == ["slow"])
        call.draining.set()
        call.send(text(2, "late"))
        refused = (await call.next())[2].error
        assert (refused.code, refused.retry_after_ms) == (grpc.StatusCode.UNAVAILABLE.value[0], 1000)
        call.gates["slow"].set()
        assert ids((await call.next())[1]) == [0, 1, 2, 3]
        with pytest.raises(StopAsyncIteration):
            await call.next()


async def test_a_client_that_vanishes_leaves_nothing_running() -> None:
    async with Call() as call:
        call.gates["slow"] = asyncio.Event()
        call.send(*(text(n, "slow") for n in range(100)))
        await call.until(lambda: len(call.running) == 100)
        await call.responses.aclose()
        await call.until(lambda: not call.running)
        assert call.count("Tokenize", "CANCELLED") == 100


async def test_no_more_is_read_while_too_much_is_under_way(monkeypatch) -> None:
    monkeypatch.setattr(encode_call, "_MOST_ITEMS", 2)
    async with Call() as call:
        call.gates["slow"] = asyncio.Event()
        for n in range(5):
            call.send(text(n, "slow"))
        await call.until(lambda: len(call.running) == 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert call.read == 3
        call.gates["slow"].set()
        found: set[int] = set()
        while len(found) < 5:
            found |= (await call.next()).keys()
