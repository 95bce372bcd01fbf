"""Embeddings: texts become tokens, and the tokens of one request go to one worker together.

No prefix of an embedding is cached, so the worker with the fewest requests gets it. One that is lost or refuses is not asked
again; each other is asked once.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from sapwood.v1 import worker_pb2
from sapwood_common.channel import request_metadata
from sapwood_common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)
from sapwood_common.status import from_rpc_error
from sapwood_router.convert import to_embed_request
from sapwood_router.embed_request import Embeddings, EmbedRequest
from sapwood_router.registry import RETRY_AFTER, Registry
from sapwood_router.tokenizer_client import TokenizerClient
from sapwood_router.validation import MAX_EMBEDDED, check_token_ids
from sapwood_router.worker import Worker

logger = logging.getLogger(__name__)

_RETRIED = (UnavailableError, ResourceExhaustedError)


class Embedder:
    """Embeds.

    Args:
        tokenizer: Encodes texts.
        registry: Knows the workers.
    """

    def __init__(self, tokenizer: TokenizerClient, registry: Registry) -> None:
        self._tokenizer = tokenizer
        self._registry = registry

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """The vectors of all inputs.

        Raises:
            InvalidArgumentError: An input is empty or too long, or the model makes no embeddings; the field is the client's.
            NotFoundError: There is no such model.
            UnavailableError: No worker is left.
            SapwoodError: As the tokenizer or the worker answers.
        """
        if not request.inputs:
            raise InvalidArgumentError("there is nothing to embed", field="input")
        if len(request.inputs) > MAX_EMBEDDED:
            raise InvalidArgumentError(f"at most {MAX_EMBEDDED} inputs, got {len(request.inputs)}", field="input")
        model = self._registry.resolve(request.model)
        workers = self._workers(model)
        sequences = await self._encode(request)
        served = workers[0].model
        assert served is not None
        for name, sequence in zip(request.names, sequences, strict=True):
            if len(sequence) > served.context_length:
                raise InvalidArgumentError(
                    f"it has {len(sequence)} tokens, the model takes {served.context_length}", field=name
                )
        if request.dimensions not in (None, served.embedding_size):
            raise InvalidArgumentError(
                f"the model's embeddings have {served.embedding_size} dimensions", field="dimensions"
            )
        answer = await self._ask(model, request, sequences)
        return Embeddings(model, [item.values for item in answer.embeddings], answer.prompt_tokens)

    def _workers(self, model: str) -> list[Worker]:
        available = self._registry.available(model)
        if not available:
            raise UnavailableError(f"no worker is available for model {model!r}", retry_after=RETRY_AFTER)
        found = [worker for worker in available if worker.model is not None and worker.model.embedding_size > 0]
        if not found:
            raise InvalidArgumentError(f"model {model!r} makes no embeddings", field="model")
        return found

    async def _encode(self, request: EmbedRequest) -> list[list[int]]:
        texts = [item for item in request.inputs if isinstance(item, str)]
        encoded = iter(await self._tokenizer.encode_texts(texts, request.request_id, request.deadline) if texts else ())
        sequences = []
        for name, item in zip(request.names, request.inputs, strict=True):
            if isinstance(item, str):
                if not item:
                    raise InvalidArgumentError("it is empty", field=name)
                sequences.append(next(encoded))
            else:
                check_token_ids(item, name)
                sequences.append(item)
        return sequences

    async def _ask(
        self, model: str, request: EmbedRequest, sequences: list[list[int]]
    ) -> worker_pb2.WorkerEmbedResponse:
        message = to_embed_request(request.request_id, sequences, request.pooling, request.normalize)
        tokens = sum(map(len, sequences))
        tried: dict[str, SapwoodError] = {}
        while True:
            left = [worker for worker in self._registry.available(model) if worker.address not in tried]
            left = [worker for worker in left if worker.stub is not None]
            if not left:
                raise next(
                    reversed(tried.values()),
                    UnavailableError(f"no worker is available for model {model!r}", retry_after=RETRY_AFTER),
                )
            timeout = request.deadline - asyncio.get_running_loop().time()
            if timeout <= 0:
                raise DeadlineExceededError("the deadline passed before a worker was called")
            worker = min(left, key=lambda candidate: candidate.view().requests)
            assert worker.stub is not None
            lease = worker.lease(tokens)
            try:
                return await worker.stub.Embed(message, timeout=timeout, metadata=request_metadata(request.request_id))
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                if not isinstance(error, _RETRIED):
                    raise error from failure
                tried[worker.address] = error
                logger.info("worker %s: %s; trying another", worker.address, error.message)
            finally:
                lease.release()
