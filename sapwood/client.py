"""A small client for Sapwood's router, in a blocking and an asyncio form. It needs only grpcio and protobuf.

    from sapwood.client import Client

    with Client() as client:
        for delta in client.generate("The capital of France is", max_tokens=32, temperature=0):
            print(delta.text, end="", flush=True)

Any error is a :class:`~sapwood.errors.SapwoodError` with ``status``, ``message`` and, where the request was at fault, ``field``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack, cast

import grpc

from sapwood.async_client import AsyncClient, AsyncGeneration
from sapwood.call_setup import (
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    Calls,
    request_id_of,
    sapwood_errors,
)
from sapwood.classification import Classifications, ClassifyOptions, build_classify_request, to_classifications
from sapwood.embedding import Embeddings, EmbedOptions, build_embed_request, to_embeddings
from sapwood.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SapwoodError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    from_rpc_error,
)
from sapwood.generation import (
    Answer,
    Delta,
    FinishReason,
    Model,
    Options,
    ToolCall,
    Usage,
    WorkerStatus,
    answer_of,
    to_delta,
    to_models,
    to_workers,
)
from sapwood.request import build_request
from sapwood.scoring import Continuation, ScoreOptions, Scores, build_score_request, to_scores
from sapwood.v1 import router_pb2, router_pb2_grpc

__all__ = [
    "DEFAULT_ADDRESS",
    "AlreadyExistsError",
    "Answer",
    "AsyncClient",
    "AsyncGeneration",
    "CancelledError",
    "Classifications",
    "Client",
    "DeadlineExceededError",
    "Delta",
    "Embeddings",
    "FinishReason",
    "Generation",
    "InvalidArgumentError",
    "Model",
    "NotFoundError",
    "ResourceExhaustedError",
    "SapwoodError",
    "ServerError",
    "ToolCall",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "WorkerStatus",
]


class Generation(Iterator[Delta]):
    """An answer as it arrives: iterate over it once for the deltas, or call :meth:`text` for all of it.

    Leaving the ``with`` block, :meth:`cancel` or dropping the object before the end stops the generation on the servers.
    """

    def __init__(self, call: Iterator[router_pb2.RouterGenerateResponse]) -> None:
        self._call = cast(Any, call)  # at run time it is a grpc.Call as well

    @property
    def request_id(self) -> str | None:
        """The id under which the services log this request. Waits for the server's initial metadata."""
        return request_id_of(self._call.initial_metadata())

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            SapwoodError: The call failed.
            StopIteration: The answer is complete.
        """
        try:
            return to_delta(next(self._call))
        except grpc.RpcError:
            raise from_rpc_error(self._call, request_id=self.request_id) from None

    def text(self) -> str:
        """The rest of the answer's text. Raises what iterating raises."""
        return "".join(delta.text for delta in self)

    def answer(self) -> Answer:
        """The rest of the answer, put together; not with ``n``. Raises what iterating raises."""
        return answer_of(self)

    def cancel(self) -> None:
        """Stops the generation; harmless once it has ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client(Calls):
    """A connection to a router, for threads. Safe to share between them.

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
            self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Starts a generation and returns at once; errors of the call appear when iterating.

        Args:
            text: A prompt to continue.
            messages: A conversation to answer: mappings with ``role`` and ``content``, and where they are needed ``name``,
                ``tool_calls``, ``tool_call_id`` and ``reasoning``.
            token_ids: A prompt as the model's token ids.
            options: The fields of :class:`~sapwood.generation.Options`.

        Raises:
            ValueError: Not exactly one prompt is given, there is no such option, or a value is beyond what its field can hold.
            TypeError: A value is of another type than its field.
        """
        request = build_request(text, messages, token_ids, options)
        return Generation(self._stub.Generate(request, **self._settings()))

    def embed(self, inputs: str | Iterable[str | Iterable[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """The vectors of a text, or of several texts and token sequences.

        Args:
            inputs: A text, or texts and token sequences.
            options: The fields of :class:`~sapwood.embedding.EmbedOptions`.

        Raises:
            SapwoodError: The call failed.
            ValueError, TypeError: An input is neither text nor token ids, or an option is wrong.
        """
        request = build_embed_request(inputs, options)
        with sapwood_errors():
            return to_embeddings(self._stub.Embed(request, **self._settings()))

    def classify(
        self, inputs: str | Iterable[str | tuple[str, str] | Sequence[int]], **options: Unpack[ClassifyOptions]
    ) -> Classifications:
        """How well each label of the model's head fits a text, or several texts, pairs of texts and token sequences.

        Args:
            inputs: A text, or texts, pairs of texts (of a model that compares them) and token sequences.
            options: The fields of :class:`~sapwood.classification.ClassifyOptions`.

        Raises:
            SapwoodError: The call failed.
            ValueError, TypeError: An input is none of these, or an option is wrong.
        """
        request = build_classify_request(inputs, options)
        with sapwood_errors():
            return to_classifications(self._stub.Classify(request, **self._settings()))

    def score(
        self,
        continuations: Iterable[str | Sequence[int] | Continuation],
        text: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """How likely continuations of a prompt are. What several of them begin with is computed once.

        Args:
            continuations: Texts, token ids, or trees of them.
            text, messages, token_ids: The prompt, as for :meth:`generate`.
            options: The fields of :class:`~sapwood.scoring.ScoreOptions`.

        Raises:
            ValueError, TypeError: An argument is wrong.
            SapwoodError: The router refused, or it failed.
        """
        request = build_score_request(continuations, text, messages, token_ids, options)
        with sapwood_errors():
            return to_scores(self._stub.Score(request, **self._settings()))

    def list_models(self) -> list[Model]:
        """The models that can be asked for. Raises SapwoodError."""
        with sapwood_errors():
            return to_models(self._stub.ListModels(router_pb2.ListModelsRequest(), **self._settings()))

    def list_workers(self) -> list[WorkerStatus]:
        """The workers and their load. Raises SapwoodError."""
        with sapwood_errors():
            return to_workers(self._stub.ListWorkers(router_pb2.ListWorkersRequest(), **self._settings()))

    def open_session(self, ttl_seconds: float | None = None, *, fork_of: str = "") -> str:
        """Opens a session, which ``generate(..., session=id)`` continues with; returns its id.

        Args:
            ttl_seconds: Seconds that it lives unused; None: 300.
            fork_of: The id of another session, with all that it holds; empty: it begins with nothing.

        Raises:
            SapwoodError: The router did not open it.
        """
        request = router_pb2.OpenSessionRequest(ttl_seconds=ttl_seconds, fork_of=fork_of)
        with sapwood_errors():
            return self._stub.OpenSession(request, **self._settings()).session.id

    def close_session(self, session_id: str) -> None:
        """Closes a session. Raises SapwoodError, a NotFoundError if there is none."""
        with sapwood_errors():
            self._stub.CloseSession(router_pb2.CloseSessionRequest(id=session_id), **self._settings())

    def close(self) -> None:
        """Closes the connection; running generations end with :class:`CancelledError`."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
