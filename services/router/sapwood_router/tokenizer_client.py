"""The tokenizer service as the pipeline uses it: encode a prompt, and ride out a restart of the service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.channel import request_metadata
from sapwood_common.errors import DeadlineExceededError, UnavailableError
from sapwood_common.status import from_rpc_error
from sapwood_router.context import ChatPrompt
from sapwood_router.convert import to_turns
from sapwood_router.health import check
from sapwood_router.structure import CompiledGrammar

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_PAUSE = 0.1
_DOWN_INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as tokens; ``reasoning_open`` says whether the output begins inside reasoning, None if unknown."""

    token_ids: list[int]
    reasoning_open: bool | None


@dataclass(frozen=True, slots=True)
class Parsers:
    """The tokenizer's names of the parsers that fit the model; "" where none does."""

    tool_parser: str
    reasoning_parser: str


class TokenizerClient:
    """Encodes prompts over one channel, and knows which parsers the model's output needs.

    Args:
        channel: To the tokenizer service; closed by whoever opened it.
        grace: Seconds that a call waits for a service that is gone.
    """

    SERVICE = "sapwood.v1.Tokenizer"

    def __init__(self, channel: grpc.aio.Channel, grace: float) -> None:
        self._stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._grace = grace
        self.problem: str | None = "not checked yet"
        """Why the service cannot be used; None while it is well."""
        self._parsers: Parsers | None = None

    async def encode_text(self, text: str, request_id: str, deadline: float) -> list[int]:
        """The tokens of a text, special tokens added.

        Raises:
            SapwoodError: The service's own error; UnavailableError if it is gone; DeadlineExceededError.
        """
        request = tokenizer_pb2.TokenizeRequest(texts=[text])
        answer = await self._patiently(
            lambda timeout: self._stub.Tokenize(request, timeout=timeout, metadata=request_metadata(request_id)),
            deadline,
        )
        return list(answer.sequences[0].ids)

    async def encode_chat(self, prompt: ChatPrompt, request_id: str, deadline: float) -> EncodedChat:
        """The tokens of a conversation, rendered with the model's template and opened for the assistant's turn.

        Raises:
            SapwoodError: As :meth:`encode_text`.
        """
        request = tokenizer_pb2.ApplyChatTemplateRequest(messages=to_turns(prompt.turns), tools=prompt.tools)
        answer = await self._patiently(
            lambda timeout: self._stub.ApplyChatTemplate(
                request, timeout=timeout, metadata=request_metadata(request_id)
            ),
            deadline,
        )
        reasoning_open = answer.reasoning_open if answer.HasField("reasoning_open") else None
        return EncodedChat(list(answer.tokens.ids), reasoning_open)

    async def parsers(self, request_id: str, deadline: float) -> Parsers:
        """The parsers that fit the model. The service is asked once, and again after :meth:`forget`.

        Raises:
            SapwoodError: As :meth:`encode_text`.
        """
        if self._parsers is not None:
            return self._parsers
        request = tokenizer_pb2.GetInfoRequest()
        answer = await self._patiently(
            lambda timeout: self._stub.GetInfo(request, timeout=timeout, metadata=request_metadata(request_id)),
            deadline,
        )
        self._parsers = Parsers(answer.tool_parser, answer.reasoning_parser)
        return self._parsers

    async def compile_grammar(
        self, request: tokenizer_pb2.CompileGrammarRequest, request_id: str, deadline: float
    ) -> CompiledGrammar:
        """The grammar of an output, as workers take it. The service keeps what it compiled.

        Raises:
            SapwoodError: As :meth:`encode_text`.
        """
        answer = await self._patiently(
            lambda timeout: self._stub.CompileGrammar(request, timeout=timeout, metadata=request_metadata(request_id)),
            deadline,
        )
        return CompiledGrammar(answer.compiled, answer.tool_parser)

    def forget(self) -> None:
        """The service may have been replaced: what it said of itself holds no longer."""
        self._parsers = None

    async def monitor(self, interval: float, on_change: Callable[[], None]) -> None:
        """Keeps ``problem`` true for ever; cancel it to stop. ``on_change`` is called when the service comes or goes."""
        while True:
            try:
                problem = await check(self._health, self.SERVICE)
            except TimeoutError:
                problem = "health checks time out"
            changed = (problem is None) != (self.problem is None)
            self.problem = problem
            if changed:
                logger.info("tokenizer is up" if problem is None else f"tokenizer is down: {problem}")
                on_change()
            await asyncio.sleep(interval if problem is None else min(interval, _DOWN_INTERVAL))

    async def _patiently(self, call: Callable[[float], Awaitable[AnswerT]], deadline: float) -> AnswerT:
        loop = asyncio.get_running_loop()
        give_up = min(loop.time() + self._grace, deadline)
        while True:
            timeout = deadline - loop.time()
            if timeout <= 0:
                raise DeadlineExceededError("the deadline passed while the prompt was tokenized")
            try:
                return await call(timeout)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise from_rpc_error(error) from error
                if loop.time() + _PAUSE >= give_up:
                    raise UnavailableError("the tokenizer is not available", retry_after=1.0) from error
            await asyncio.sleep(_PAUSE)
