"""The client for asyncio; everything here is also in :mod:`sapwood.client`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

import grpc

from sapwood.call_setup import CHANNEL_OPTIONS, Calls, request_id_of, sapwood_errors
from sapwood.classification import Classifications, ClassifyOptions, build_classify_request, to_classifications
from sapwood.embedding import Embeddings, EmbedOptions, build_embed_request, to_embeddings
from sapwood.errors import from_rpc_error
from sapwood.generation import Answer, Delta, Model, Options, WorkerStatus, answer_of, to_delta, to_models, to_workers
from sapwood.request import build_request
from sapwood.scoring import Continuation, ScoreOptions, Scores, build_score_request, to_scores
from sapwood.v1 import router_pb2, router_pb2_grpc


class AsyncGeneration(AsyncIterator[Delta]):
    """An answer as it arrives, for asyncio: ``async for`` over it once, or await :meth:`text` for all of it.

    Leaving the ``async with`` block or :meth:`cancel` before the end stops the generation on the servers.
    """

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[router_pb2.RouterGenerateRequest, router_pb2.RouterGenerateResponse]
    ) -> None:
        self._call = call
        self._responses = aiter(call)

    async def request_id(self) -> str | None:
        """The id under which the services log this request. Waits for the server's initial metadata."""
        return request_id_of(await self._call.initial_metadata())

    async def __anext__(self) -> Delta:
        """The next delta. Raises SapwoodError; asyncio.CancelledError if the awaiting task was cancelled."""
        try:
            return to_delta(await anext(self._responses))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, request_id=request_id_of(error.initial_metadata())) from None

    async def text(self) -> str:
        """The rest of the answer's text. Raises what iterating raises."""
        return "".join([delta.text async for delta in self])

    async def answer(self) -> Answer:
        """The rest of the answer, put together; not with ``n``. Raises what iterating raises."""
        return answer_of([delta async for delta in self])

    def cancel(self) -> None:
        """Stops the generation; harmless once it has ended."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient(Calls):
    """A connection to a router, for asyncio. Belongs to the event loop it is first used in.

    Args:
        address: ``host:port``; else the variable ``SAPWOOD_ROUTER``, else :data:`DEFAULT_ADDRESS`. It connects on first use.
        timeout: Seconds each call may take in all; None for no limit.
        api_key: Where the router asks for one; else the variable ``SAPWOOD_API_KEY``.
        credentials: For TLS, such as ``grpc.ssl_channel_credentials(ca)``; None is plain text.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float | None = None,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        super().__init__(address, timeout, api_key)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
        self._stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """Starts a generation and returns at once; takes and raises what :meth:`sapwood.client.Client.generate` does."""
        request = build_request(text, messages, token_ids, options)
        return AsyncGeneration(self._stub.Generate(request, **self._settings()))

    async def embed(self, inputs: str | Iterable[str | Iterable[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """The vectors of texts; takes and raises what :meth:`sapwood.client.Client.embed` does."""
        request = build_embed_request(inputs, options)
        with sapwood_errors():
            return to_embeddings(await self._stub.Embed(request, **self._settings()))

    async def classify(
        self, inputs: str | Iterable[str | tuple[str, str] | Sequence[int]], **options: Unpack[ClassifyOptions]
    ) -> Classifications:
        """How well labels fit texts; takes and raises what :meth:`sapwood.client.Client.classify` does."""
        request = build_classify_request(inputs, options)
        with sapwood_errors():
            return to_classifications(await self._stub.Classify(request, **self._settings()))

    async def score(
        self,
        continuations: Iterable[str | Sequence[int] | Continuation],
        text: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """How likely continuations are; takes and raises what :meth:`sapwood.client.Client.score` does."""
        request = build_score_request(continuations, text, messages, token_ids, options)
        with sapwood_errors():
            return to_scores(await self._stub.Score(request, **self._settings()))

    async def list_models(self) -> list[Model]:
        """The models that can be asked for. Raises SapwoodError."""
        with sapwood_errors():
            return to_models(await self._stub.ListModels(router_pb2.ListModelsRequest(), **self._settings()))

    async def list_workers(self) -> list[WorkerStatus]:
        """The workers and their load. Raises SapwoodError."""
        with sapwood_errors():
            return to_workers(await self._stub.ListWorkers(router_pb2.ListWorkersRequest(), **self._settings()))

    async def open_session(self, ttl_seconds: float | None = None, *, fork_of: str = "") -> str:
        """Opens a session and returns its id; takes and raises what :meth:`sapwood.client.Client.open_session` does."""
        request = router_pb2.OpenSessionRequest(ttl_seconds=ttl_seconds, fork_of=fork_of)
        with sapwood_errors():
            return (await self._stub.OpenSession(request, **self._settings())).session.id

    async def close_session(self, session_id: str) -> None:
        """Closes a session. Raises SapwoodError, a NotFoundError if there is none."""
        with sapwood_errors():
            await self._stub.CloseSession(router_pb2.CloseSessionRequest(id=session_id), **self._settings())

    async def close(self) -> None:
        """Closes the connection; running generations end with :class:`CancelledError`."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
