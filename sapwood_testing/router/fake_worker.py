"""A worker without a model: a real gRPC server that answers with scripted tokens, delays and failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import grpc

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.page_hash import cache_namespace, hash_pages
from sapwood_common.errors import (
    InvalidArgumentError,
    NotFoundError,
    SapwoodError,
    UnavailableError,
    UnimplementedError,
)
from sapwood_common.status import code_number
from sapwood_common.telemetry.logs import request_id_var
from sapwood_testing.router.fake_server import FakeServer
from sapwood_testing.router.fake_session import FakeSession, Put
from sapwood_testing.router.script import Script, SeenCall, SeenEmbedding

Context = grpc.aio.ServicerContext[Any, Any]

_NAME = "sapwood.v1.Worker"
_LONG_LIVED = frozenset({f"/{_NAME}/WatchLoad", f"/{_NAME}/Session"})
_epochs = itertools.count(1)


def _failure(error: SapwoodError) -> worker_pb2.SessionOutput:
    wait = None if error.retry_after is None else round(error.retry_after * 1000)
    return worker_pb2.SessionOutput(
        error=worker_pb2.GenerationError(
            code=code_number(error), message=error.message, field=error.field or "", retry_after_ms=wait
        )
    )


def _logprobs(tokens: Sequence[int], top: int) -> list[worker_pb2.TokenLogprobs]:
    """A token's is -1/8 of its id; the alternatives are the tokens from it on upwards."""
    return [
        worker_pb2.TokenLogprobs(
            logprob=-token / 8,
            top_ids=range(token, token + top),
            top_logprobs=[-other / 8 for other in range(token, token + top)],
        )
        for token in tokens
    ]


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """The service. Script tokens are followed by the end token where they end with STOP; pages seen before count as cached.

    Args:
        model: The model it claims to serve.
        page_size: Tokens a page.
        context_length: Most tokens of prompt and output.
    """

    END_TOKEN = 1

    def __init__(self, model: str = "fake", *, page_size: int = 4, context_length: int = 100_000) -> None:
        self.script = Script()
        self.calls: list[SeenCall] = []
        self.embed_calls: list[SeenEmbedding] = []
        self.pins: dict[str, list[int]] = {}
        """The token ids of each pin."""
        self.embedding_size = 3
        self.embedded_tokens = 0
        self.shortened: list[int] = []
        self.labels: list[str] = []
        self.paused: str | None = None
        """How it was paused."""
        self.sampling_defaults = common_pb2.SamplingParams()
        self.activation = worker_pb2.ACTIVATION_UNSPECIFIED
        self.epoch = next(_epochs)
        self.load = worker_pb2.LoadReport(num_pages=10_000)
        self._model = model
        self._page_size = page_size
        self._context_length = context_length
        self._seen_pages: set[bytes] = set()
        self._load_changed = asyncio.Event()
        self._server = FakeServer("worker", _NAME, _LONG_LIVED)
        self.draining = False
        self.packs_tokens = True
        """Whether it knows of that, as its elders do not."""
        self.vitals = worker_pb2.SessionResponse()
        """What sessions say in addition, such as ``frozen_ms``."""
        self.mangle: Callable[[worker_pb2.SessionResponse], Sequence[worker_pb2.SessionResponse]] = lambda one: (one,)
        """What sessions say instead of each of their messages."""
        self.silent = False
        """While set, sessions read but say nothing, as if the process hung."""

    @property
    def port(self) -> int:
        """Where it listens, once it has been started."""
        return self._server.port

    @property
    def address(self) -> str:
        """Its host and port."""
        return self._server.address

    async def start(self) -> None:
        """Serves, on the port it had before if it was started before."""
        await self._server.start(lambda grpc_server: worker_pb2_grpc.add_WorkerServicer_to_server(self, grpc_server))

    async def kill(self) -> None:
        """Cuts every connection without a goodbye; a later :meth:`start` is a new epoch with an empty cache."""
        await self._server.kill()
        self.epoch = next(_epochs)
        self._seen_pages.clear()

    async def set_serving(self, serving: bool) -> None:
        """Sets the health it reports."""
        await self._server.set_serving(serving)
        self.draining = not serving

    def report(self, load: worker_pb2.LoadReport) -> None:
        """Pushes a load report to anybody who watches."""
        self.load = load
        self._load_changed.set()
        self._load_changed = asyncio.Event()

    async def Generate(  # noqa: N802
        self, request: worker_pb2.WorkerGenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Answers as the script says."""
        call = SeenCall(request, request_id_var.get(), context.time_remaining())
        context.add_done_callback(cast(Any, lambda _: self._over(call)))
        async for response in self._answer(call):
            yield response

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """Answers each submit as the script says; one unread message a stream at most."""
        session = FakeSession(self)
        context.add_done_callback(cast(Any, lambda _: session.close()))
        info = await self.GetModelInfo(worker_pb2.GetModelInfoRequest(), context)
        reader = asyncio.ensure_future(session.read(request_iterator))
        try:
            first = worker_pb2.SessionResponse(info=info, load=self.load, draining=self.draining)
            first.MergeFrom(self.vitals)
            yield first
            while not reader.done():
                response = await session.next_response()
                for message in () if self.silent else self.mangle(response):
                    yield message
        finally:
            reader.cancel()
            session.close()

    async def run(self, call: SeenCall, put: Put) -> None:
        """One stream of a session, from its submit to its end."""
        try:
            async for response in self._answer(call):
                await put(worker_pb2.SessionOutput(response=response))
            if call.sent_tokens == 0 or not response.finish_reason:
                raise UnavailableError("the script ended without a finish")
        except SapwoodError as error:
            await put(_failure(error))
        finally:
            self._over(call)

    async def run_embedding(self, call: SeenEmbedding, put: Put) -> None:
        """The same for embeddings: of each sequence its length, first and last token, two in each message.

        Where there are labels these are their logits; of a model with two labels the first two numbers.
        """
        self.embed_calls.append(call)
        try:
            if self.script.gate is not None:
                await self.script.gate.wait()
            if self.script.error is not None:
                raise self.script.error
            if not all(item.ids for item in call.request.inputs):
                raise InvalidArgumentError("a sequence is empty", field="inputs")
            vectors = [(len(item.ids), item.ids[0], item.ids[-1]) for item in call.request.inputs]
            for start in range(0, len(vectors), 2):
                part = worker_pb2.WorkerEmbedResponse()
                for vector in vectors[start : start + 2]:
                    part.embeddings.add(values=vector[: call.request.dimensions or len(self.labels) or None])
                if start + 2 >= len(vectors):
                    part.prompt_tokens = sum(vector[0] for vector in vectors)
                await put(worker_pb2.SessionOutput(embeddings=part))
        except SapwoodError as error:
            await put(_failure(error))
        finally:
            call.over.set()

    async def _answer(self, call: SeenCall) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        self.calls.append(call)
        try:
            if len(call.request.token_ids) > self._context_length:
                raise InvalidArgumentError("the prompt is longer than the context", field="token_ids")
            async for response in self._responses(call.request):
                yield response
                call.sent_tokens += len(response.token_ids)
            call.outcome = "finished"
        except SapwoodError:
            call.outcome = "failed"
            raise

    async def _responses(
        self, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        script = self.script
        tokens = script.tokens(request.token_ids)
        reason = script.reason
        if reason == common_pb2.FINISH_REASON_STOP and not request.sampling.ignore_eos and script.ends_with_token:
            tokens = [*tokens, self.END_TOKEN]
        if request.sampling.HasField("max_tokens") and len(tokens) > request.sampling.max_tokens:
            tokens, reason = tokens[: request.sampling.max_tokens], common_pb2.FINISH_REASON_LENGTH
        cached = self._cache(request.token_ids, request.cache_salt)
        for number, start in enumerate(range(0, len(tokens), script.chunk)):
            if script.error is not None and script.fail_after == number:
                raise script.error
            if script.gate is not None and number >= script.gate_after:
                await script.gate.wait()
            if script.delay:
                await asyncio.sleep(script.delay)
            response = worker_pb2.WorkerGenerateResponse(token_ids=tokens[start : start + script.chunk], position=start)
            if request.sampling.HasField("logprobs"):
                response.logprobs.extend(_logprobs(response.token_ids, request.sampling.logprobs))
                for place, found in enumerate(response.logprobs, start):
                    found.logprob -= script.fading * place
            if number == 0 and request.sampling.HasField("prompt_logprobs"):
                response.prompt_logprobs.extend(_logprobs(request.token_ids[1:], request.sampling.prompt_logprobs))
            if start + script.chunk >= len(tokens):
                response.finish_reason = reason
                response.usage.prompt_tokens = len(request.token_ids)
                response.usage.completion_tokens = len(tokens)
                response.usage.cached_tokens = cached
            yield response

    def _cache(self, token_ids: Sequence[int], cache_salt: str) -> int:
        hashes = hash_pages(token_ids, self._page_size, salt=cache_namespace(cache_salt))
        cached = 0
        for page in hashes:
            if page not in self._seen_pages:
                break
            cached += self._page_size
        self._seen_pages.update(hashes)
        return cached

    def _over(self, call: SeenCall) -> None:
        if call.outcome == "running":
            call.outcome = "cancelled"
        call.over.set()

    async def Abort(  # noqa: N802
        self, request: worker_pb2.AbortRequest, context: Context
    ) -> worker_pb2.AbortResponse:
        """Finds nothing."""
        return worker_pb2.AbortResponse(found=False)

    async def Pause(  # noqa: N802
        self, request: worker_pb2.PauseRequest, context: Context
    ) -> worker_pb2.PauseResponse:
        """Notes it."""
        self.paused = "retract" if request.retract else "in_place"
        return worker_pb2.PauseResponse()

    async def Resume(  # noqa: N802
        self, request: worker_pb2.ResumeRequest, context: Context
    ) -> worker_pb2.ResumeResponse:
        """Notes it."""
        self.paused = None
        return worker_pb2.ResumeResponse()

    async def GetModelInfo(  # noqa: N802
        self, request: worker_pb2.GetModelInfoRequest, context: Context
    ) -> worker_pb2.GetModelInfoResponse:
        """Describes the model there is none of."""
        if not self._model:
            raise NotFoundError("no model")
        return worker_pb2.GetModelInfoResponse(
            model=self._model,
            architecture="fake",
            dtype="float32",
            context_length=self._context_length,
            vocab_size=1000,
            eos_token_ids=[self.END_TOKEN],
            page_size=self._page_size,
            num_pages=self.load.num_pages,
            epoch=self.epoch,
            embedding_size=self.embedding_size,
            embedded_tokens=self.embedded_tokens,
            shortens_embeddings=bool(self.shortened),
            embedding_dimensions=self.shortened,
            labels=self.labels,
            activation=self.activation,
            sampling_defaults=self.sampling_defaults,
        )

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Reports what :meth:`report` was given."""
        while True:
            changed = self._load_changed
            yield worker_pb2.WatchLoadResponse(load=self.load)
            await changed.wait()

    async def SubscribeKvEvents(  # noqa: N802
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        """It has none."""
        raise UnimplementedError("this worker publishes no KV events")
        yield worker_pb2.SubscribeKvEventsResponse()

    async def FlushCache(  # noqa: N802
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        """Forgets which prompts were seen."""
        freed = len(self._seen_pages)
        self._seen_pages.clear()
        return worker_pb2.FlushCacheResponse(freed_pages=freed)

    async def PinPrefix(  # noqa: N802
        self, request: worker_pb2.PinPrefixRequest, context: Context
    ) -> worker_pb2.PinPrefixResponse:
        """Takes note of it; all of it counts as cached."""
        self.pins[request.name] = list(request.token_ids)
        return worker_pb2.PinPrefixResponse(pinned_tokens=len(request.token_ids))

    async def UnpinPrefix(  # noqa: N802
        self, request: worker_pb2.UnpinPrefixRequest, context: Context
    ) -> worker_pb2.UnpinPrefixResponse:
        """Forgets it."""
        return worker_pb2.UnpinPrefixResponse(found=self.pins.pop(request.name, None) is not None)
