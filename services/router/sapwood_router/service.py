"""The gRPC edge: ``Router`` of ``router.proto``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, cast

import grpc

from sapwood.v1 import router_pb2, router_pb2_grpc
from sapwood_common.telemetry import REQUEST_ID_KEY, request_id_var
from sapwood_router.caller import caller_of
from sapwood_router.context import RequestContext
from sapwood_router.continuations import continuations
from sapwood_router.convert import (
    add_logprobs,
    grammar_of,
    prompt_of,
    sampling_of,
    to_load,
    to_response,
    tool_choice_of,
)
from sapwood_router.guard import key_name_var
from sapwood_router.output import OutputOptions
from sapwood_router.pipeline.merge import merged
from sapwood_router.pipeline.pipeline import Pipeline, close_all
from sapwood_router.request_ids import accept_request_id, unique_id

SERVICE_NAME = "sapwood.v1.Router"
GENERATE = f"/{SERVICE_NAME}/Generate"
PUBLIC_METHODS = frozenset(f"/{SERVICE_NAME}/{name}" for name in ("Generate", "Embed", "ListModels"))
"""What clients call; everything else is for operators."""
WORKER_KEY = "x-sapwood-worker"
"""Trailing metadata: the address of the worker that finished the request."""
RESUMPTIONS_KEY = "x-sapwood-resumptions"
"""Trailing metadata: how often the stream went on, on another worker, because one was lost."""

Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServicer):
    """Messages in, messages out; everything else is the pipeline's.

    Args:
        pipeline: Runs the requests.
        request_timeout: Seconds a request may take if its client sets no earlier deadline.
    """

    def __init__(self, pipeline: Pipeline, request_timeout: float) -> None:
        self._pipeline = pipeline
        self._request_timeout = request_timeout

    async def Generate(
        self, request: router_pb2.RouterGenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
        """Streams the continuation of a prompt."""
        metadata = dict(_metadata(context))
        request_id = accept_request_id(request.request_id or metadata.get(REQUEST_ID_KEY, ""), "request_id")
        request_id_var.set(request_id)
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        prompt, fields = prompt_of(request)
        left = context.time_remaining()
        caller = caller_of(metadata.get, key_name_var.get())
        deadline = asyncio.get_running_loop().time() + (
            self._request_timeout if left is None else min(left, self._request_timeout)
        )
        contexts = [
            RequestContext(
                request_id=request_id,
                worker_request_id=unique_id(request_id),
                prompt=prompt,
                sampling=sampling,
                output=OutputOptions(
                    stop=tuple(request.stop),
                    skip_special_tokens=request.skip_special_tokens
                    if request.HasField("skip_special_tokens")
                    else True,
                ),
                fields=fields,
                deadline=deadline,
                model=request.model if request.HasField("model") else None,
                caller=caller,
                grammar=grammar_of(request),
                tool_choice=tool_choice_of(request),
                parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
            )
            for sampling in continuations(sampling_of(request.sampling), _count(request), fields)
        ]
        runs = [self._pipeline.open(item) for item in contexts]
        # A client that leaves while a response is being written ends the call without this generator's knowledge.
        context.add_done_callback(cast(Any, lambda _: close_all(runs)))
        try:
            async with aclosing(merged(runs)) as deltas:
                told = not request.sampling.HasField("prompt_logprobs")
                async for index, delta in deltas:
                    response = to_response(delta, index)
                    if index == 0 and not told:
                        told = True
                        add_logprobs(response.prompt_logprobs, contexts[0].prompt_logprobs)
                    yield response
            context.set_trailing_metadata(
                (
                    (WORKER_KEY, contexts[0].worker),
                    (RESUMPTIONS_KEY, str(sum(item.resumptions for item in contexts))),
                )
            )
        finally:
            close_all(runs)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """The models that can be asked for."""
        response = router_pb2.ListModelsResponse()
        registry = self._pipeline.registry
        for model, workers in sorted(registry.models().items()):
            response.models.add(id=model, context_length=registry.context_length(model), workers=len(workers))
        return response

    async def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: Context
    ) -> router_pb2.ListWorkersResponse:
        """The workers and what the router knows of each."""
        response = router_pb2.ListWorkersResponse()
        for worker in self._pipeline.registry.all():
            response.workers.add(
                address=worker.address,
                healthy=worker.available,
                model=worker.model.model if worker.model is not None else "",
                in_flight=worker.in_flight,
                load=to_load(worker.load),
            )
        return response


def _count(request: router_pb2.RouterGenerateRequest) -> int:
    return request.sampling.n if request.sampling.HasField("n") else 1


def _metadata(context: Context) -> Iterator[tuple[str, str]]:
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield key, value
