"""Sapwood's router over gRPC: ``Router.Generate``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc

from sapwood.bench.data.conversation import Api, Ask
from sapwood.bench.targets.record import NOTHING, Record, clock
from sapwood.bench.targets.target import Sampling, TargetError
from sapwood.call_setup import CHANNEL_OPTIONS, call_metadata
from sapwood.errors import from_rpc_error
from sapwood.generation import Options
from sapwood.request import build_request
from sapwood.v1 import common_pb2, router_pb2, router_pb2_grpc

_CALLS_A_CHANNEL = 64
"""Servers take no more than some hundred calls over a connection; those beyond would wait in the client, unseen."""
_CONNECT_SECONDS = 30.0


class GrpcTarget:
    """Implements :class:`~sapwood.bench.targets.target.Target`. Opens another connection for every 64 requests at a time.

    Args:
        address: ``host:port``.
        api: Whether a text is a prompt to continue with or a user's message.
        sampling: How all requests are sampled; ``extra`` is refused.
        model: None asks for the only one there is.
        api_key: Sent as metadata.
        ca: The certificate, as PEM, of the authority that signed the server's; None connects without TLS.
        timeout: Seconds that a request may take.

    Raises:
        ValueError: ``sampling`` has extra fields.
    """

    def __init__(
        self,
        address: str,
        api: Api,
        sampling: Sampling,
        *,
        model: str | None,
        api_key: str | None,
        ca: bytes | None,
        timeout: float,
    ) -> None:
        if sampling.extra:
            raise ValueError("further fields of the body are for HTTP only")
        self._address = address
        self._api = api
        self._sampling = sampling
        self._model = model
        self._metadata = call_metadata(api_key)
        self._credentials = None if ca is None else grpc.ssl_channel_credentials(ca)
        self._timeout = timeout
        self._lines: list[_Line] = []

    async def connect(self) -> str:
        with self._line() as stub:
            try:
                listed = await stub.ListModels(
                    router_pb2.ListModelsRequest(), timeout=_CONNECT_SECONDS, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                raise TargetError(f"{self._address}: {from_rpc_error(error)}") from None
        names = [model.id for model in listed.models]
        if self._model is None:
            if not names:
                raise TargetError(f"{self._address} lists no model")
            self._model = names[0]
        return self._model

    async def ask(self, ask: Ask, record: Record) -> None:
        options: dict[str, Any] = {"temperature": self._sampling.temperature}
        if self._sampling.ignore_eos:
            options["ignore_eos"] = True
        if ask.max_tokens is not None:
            options["max_tokens"] = ask.max_tokens
        if ask.json_schema:
            options["json_schema"] = ask.json_schema
        if ask.stop:
            options["stop"] = ask.stop
        await self._generate(ask, options, record)

    async def score(self, text: str, record: Record) -> list[float]:
        if self._api == "chat":
            record.sent = record.ended = clock()
            record.fail("not served", "texts are scored by --api completions only")
            return []
        return await self._generate(Ask(text, 1), {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}, record)

    async def _generate(self, ask: Ask, options: dict[str, Any], record: Record) -> list[float]:
        """Asks with the client's options; returns the log probabilities of the prompt's tokens but its first, if asked for."""
        probabilities: list[float] = []
        try:
            request = self._request(ask, {"model": self._model, **options})
        except (ValueError, TypeError) as error:
            record.sent = record.ended = clock()
            record.fail("wrong value", str(error))
            return probabilities
        with self._line() as stub:
            record.sent = clock()
            try:
                async with asyncio.timeout(self._timeout):
                    call = stub.Generate(request, metadata=self._metadata)
                    while isinstance(response := await call.read(), router_pb2.RouterGenerateResponse):
                        _take(response, record)
                        probabilities += [found.logprob for found in response.prompt_logprobs]
            except TimeoutError:
                record.fail("timeout")
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                record.fail(failure.status.name, str(failure))
            finally:
                record.ended = clock()
        if not record.error and not record.arrivals and record.completion_tokens is None:
            record.fail(NOTHING)
        return probabilities

    async def close(self) -> None:
        for line in self._lines:
            await line.channel.close()

    def _request(self, ask: Ask, options: dict[str, Any]) -> router_pb2.RouterGenerateRequest:
        text: str | None = None
        messages: Any = None
        token_ids: Any = None
        if isinstance(ask.prompt, str) and self._api == "chat":
            messages = [{"role": "user", "content": ask.prompt}]
        elif isinstance(ask.prompt, str):
            text = ask.prompt
        elif ask.prompt and isinstance(ask.prompt[0], int):
            token_ids = ask.prompt
        else:
            messages = ask.prompt
        return build_request(text, messages, token_ids, cast(Options, options))

    @contextmanager
    def _line(self) -> Iterator[router_pb2_grpc.RouterAsyncStub]:
        """The stub of a connection with room for another call."""
        line = next((each for each in self._lines if each.calls < _CALLS_A_CHANNEL), None)
        if line is None:
            line = _Line(self._address, self._credentials)
            self._lines.append(line)
        line.calls += 1
        try:
            yield line.stub
        finally:
            line.calls -= 1


class _Line:
    """A connection of its own."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self.channel = (
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
        )
        self.stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(self.channel)
        self.calls = 0


def _take(response: router_pb2.RouterGenerateResponse, record: Record) -> None:
    if response.text or response.reasoning or response.tool_calls:
        record.arrivals.append(clock())
        record.pieces.append(response.text)
    if response.finish_reason:
        record.finish_reason = "length" if response.finish_reason == common_pb2.FINISH_REASON_LENGTH else "stop"
    if response.HasField("usage"):
        record.prompt_tokens = response.usage.prompt_tokens
        record.completion_tokens = response.usage.completion_tokens
        record.cached_tokens = response.usage.cached_tokens
