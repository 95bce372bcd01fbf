"""The gRPC edge: ``Router`` of ``router.proto``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import grpc

from sapwood.v1 import router_pb2, router_pb2_grpc, worker_pb2
from sapwood_common.contract.sampling_message import from_message
from sapwood_common.contract.seeds import RANDOM_SEEDS, Seeds
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.serving.push_call import PushCall
from sapwood_common.telemetry.logs import REQUEST_ID_KEY, new_request_id, request_id_var
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_net.pacing.steps import all_at_once, in_turns
from sapwood_router.edges.grpc.convert import (
    cache_hint_of,
    classify_request_of,
    embed_request_of,
    grammar_of,
    prompt_of,
    score_request_of,
    to_classifications,
    to_response,
    to_scores,
    to_session,
    tool_choice_of,
    truncation_of,
)
from sapwood_router.edges.grpc.convert_operators import (
    to_explanation,
    to_fleet_lora,
    to_pause_mode,
    to_status,
    to_worker_status,
)
from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.flow.adapters import Adapters
from sapwood_router.flow.client import READER_SLACK, Client
from sapwood_router.flow.explain import explain
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.score import score
from sapwood_router.flow.steering import Steering
from sapwood_router.observe.status import RouterState
from sapwood_router.request.caller import Caller, caller_of
from sapwood_router.request.context import Delta, RequestContext, accept_request_id, unique_id
from sapwood_router.request.objective import STATUS_KEY, worst
from sapwood_router.request.output import OutputOptions
from sapwood_router.request.tokens import MANY
from sapwood_router.request.validation import check_counts, continuations

SERVICE_NAME = "sapwood.v1.Router"
TRACED = frozenset(f"/{SERVICE_NAME}/{name}" for name in ("Generate", "Score", "Embed", "Classify"))
"""Methods that begin a trace if the caller sends none."""
PUBLIC_METHODS = frozenset(
    f"/{SERVICE_NAME}/{name}"
    for name in ("Generate", "Score", "Embed", "Classify", "ListModels", "OpenSession", "GetSession", "CloseSession")
)
"""The methods for clients; all others are for operators."""
WORKER_KEY = "x-sapwood-worker"
"""Trailing metadata: the id of the worker that finished the request."""
RESUMPTIONS_KEY = "x-sapwood-resumptions"
"""Trailing metadata: how often the stream went on, on another worker, because one was lost."""
NOTICE_KEY = "x-sapwood-notice"
"""Trailing metadata: notices for the client in addition to its answer, if there are any."""


Context = grpc.aio.ServicerContext[Any, Any]


class _CallClient(Client):
    """Writes the deltas of a request's runs as messages of its call.

    Args:
        call: The call.
        contexts: The runs'.
    """

    def __init__(self, call: PushCall, contexts: Sequence[RequestContext]) -> None:
        super().__init__()
        self._call = call
        self._untold = contexts[0] if contexts[0].sampling.prompt_logprobs is not None else None
        """Requests whose prompt's log probabilities are still to be sent."""

    def writable(self) -> bool:
        return self._call.is_ready()

    async def drained(self) -> None:
        await self._call.drained()
        if self._call.done():
            raise asyncio.CancelledError

    def write(self, delta: Delta) -> bool:
        response = to_response(delta)
        if self._untold is not None and delta.index == 0:
            # They are still the worker's messages; there may be very many.
            response.prompt_logprobs.extend(cast(Any, self._untold.prompt_logprobs))
            self._untold = None
        self._call.write_now(response)
        return True


class Members(Protocol):
    """The workers as operators handle them: by address. Each method raises NotFoundError where there is no such worker."""

    def register(self, address: str, lease: float | None) -> None:
        """There is this worker, for ``lease`` seconds unless it is renewed; None: for good."""
        ...

    def drain(self, address: str, draining: bool) -> int:
        """It gets nothing new, or gets requests again; returns how many run on it."""
        ...

    def remove(self, address: str) -> None:
        """There is no such worker any more."""
        ...


class RouterService(router_pb2_grpc.RouterServicer):
    """Implements ``sapwood.v1.Router``; the proto says what each method does. Everything but messages is the pipeline's.

    Args:
        pipeline: Runs the requests.
        fleet: Adds, drains and removes workers.
        steering: Ends, pauses and resumes all requests.
        request_timeout: Seconds a request may take if its client sets no earlier deadline.
        status: Says how the router is.
        workers: Names workers for clients.
        adapters: Loads and unloads them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        fleet: Members,
        steering: Steering,
        request_timeout: float,
        status: Callable[[], RouterState],
        workers: WorkerNames,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._workers = workers
        self._status = status
        self._pipeline = pipeline
        self._fleet = fleet
        self._steering = steering
        self._request_timeout = request_timeout

    async def Generate(self, request: router_pb2.RouterGenerateRequest, context: Context) -> None:  # type: ignore[override]
        with self._workers.hidden():
            await self._generate(request, context)

    async def _generate(self, request: router_pb2.RouterGenerateRequest, context: Context) -> None:
        call = _as_push_call(context)
        metadata = dict(_metadata(context))
        request_id = accept_request_id(request.request_id or metadata.get(REQUEST_ID_KEY, ""), "request_id")
        request_id_var.set(request_id)
        call.set_initial_metadata(((REQUEST_ID_KEY, request_id),))
        caller, left = _caller(context, metadata), context.time_remaining()
        contexts = await self._contexts(request, request_id, caller, left, self._pipeline.seeds)
        await self._begin_session(request.session, contexts)
        runs = await self._pipeline.open_all(contexts)
        # A client that leaves ends the call, whatever its handler is waiting for.
        context.add_done_callback(cast(Any, lambda _: self._pipeline.close_all(runs)))
        # So does one that reads nothing until our deadline; the server ends calls by the deadline that clients name.
        giving_up = asyncio.get_running_loop().call_at(contexts[0].deadline + READER_SLACK, _give_up, call)
        try:
            await _CallClient(call, contexts).carry(runs)
            context.set_trailing_metadata(
                (
                    (WORKER_KEY, self._workers.id_of(contexts[0].worker)),
                    (RESUMPTIONS_KEY, str(sum(item.resumptions for item in contexts))),
                    *((STATUS_KEY, told) for told in (worst(item.objective for item in contexts),) if told),
                    *(((NOTICE_KEY, contexts[0].notice),) if contexts[0].notice else ()),
                )
            )
        finally:
            giving_up.cancel()
            self._pipeline.close_all(runs)
            runs.clear()  # the call and its callback refer to each other: let them keep nothing else until they are collected

    async def _begin_session(self, session_id: str, contexts: Sequence[RequestContext]) -> None:
        """Lets a request go on with its session, if it names one; its run lets go of that."""
        if not session_id:
            return
        if len(contexts) > 1:
            raise InvalidArgumentError("a session goes on with one answer", field="sampling.n")
        context = contexts[0]
        context.session = await self._pipeline.sessions.begin(context.caller.tenant, session_id, context.model)

    async def _contexts(
        self,
        request: router_pb2.RouterGenerateRequest,
        request_id: str,
        caller: Caller,
        left: float | None,
        seeds: Seeds,
    ) -> list[RequestContext]:
        check_counts(len(request.stop), len(request.bad_words))
        many = len(request.messages.messages) > A_FEW or len(request.tokens.ids) > MANY
        steps = prompt_of(request)
        prompt, fields = (
            await in_turns(steps, self._pipeline.heavy.stint(caller.tenant)) if many else all_at_once(steps)
        )
        sampling, count = from_message(request.sampling, seeds=seeds)
        hint = cache_hint_of(request)
        deadline = asyncio.get_running_loop().time() + (
            self._request_timeout if left is None else min(left, self._request_timeout)
        )
        return [
            RequestContext(
                request_id=request_id,
                worker_request_id=unique_id(request_id),
                prompt=prompt,
                sampling=own,
                output=OutputOptions(
                    stop=tuple(request.stop),
                    skip_special_tokens=request.skip_special_tokens
                    if request.HasField("skip_special_tokens")
                    else True,
                    include_stop=request.include_stop,
                ),
                fields=fields,
                deadline=deadline,
                whole=request.whole,
                detokenize=request.detokenize if request.HasField("detokenize") else True,
                model=request.model if request.HasField("model") else None,
                lora=request.lora_name,
                truncation=truncation_of(request),
                heals=request.token_healing,
                bad_words=tuple(word.lstrip() for word in request.bad_words),
                caller=caller,
                hint=hint,
                grammar=grammar_of(request),
                tool_choice=tool_choice_of(request),
                parallel_tool_calls=request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True,
            )
            for own in continuations(sampling, count, fields)
        ]

    async def Score(self, request: router_pb2.RouterScoreRequest, context: Context) -> router_pb2.RouterScoreResponse:
        request_id, deadline, caller = self._asked(request.request_id, context)
        steps = score_request_of(request, request_id, deadline, caller)
        with self._workers.hidden():
            wanted = await in_turns(steps, self._pipeline.heavy.stint(caller.tenant))
            return to_scores(await score(self._pipeline, wanted))

    async def Embed(self, request: router_pb2.RouterEmbedRequest, context: Context) -> router_pb2.RouterEmbedResponse:
        with self._workers.hidden():
            found = await self._pipeline.embedder.embed(
                embed_request_of(request, *self._asked(request.request_id, context))
            )
        return router_pb2.RouterEmbedResponse(
            embeddings=[worker_pb2.Embedding(values=vector) for vector in found.vectors],
            prompt_tokens=found.prompt_tokens,
            model=found.model,
        )

    async def Classify(self, request: router_pb2.ClassifyRequest, context: Context) -> router_pb2.ClassifyResponse:
        wanted = classify_request_of(request, *self._asked(request.request_id, context))
        with self._workers.hidden():
            return to_classifications(await self._pipeline.embedder.embed(wanted), raw=request.raw)

    def _asked(self, request_id: str, context: Context) -> tuple[str, float, Caller]:
        """The id of a request, its deadline on the event loop's clock, and its caller."""
        metadata = dict(_metadata(context))
        request_id = accept_request_id(request_id or metadata.get(REQUEST_ID_KEY, ""), "request_id")
        request_id_var.set(request_id)
        left = context.time_remaining()
        deadline = asyncio.get_running_loop().time() + (
            self._request_timeout if left is None else min(left, self._request_timeout)
        )
        return request_id, deadline, _caller(context, metadata)

    async def OpenSession(
        self, request: router_pb2.OpenSessionRequest, context: Context
    ) -> router_pb2.OpenSessionResponse:
        ttl = request.ttl_seconds if request.HasField("ttl_seconds") else None
        session = await self._pipeline.sessions.open(self._tenant(context), ttl, request.fork_of)
        return router_pb2.OpenSessionResponse(session=to_session(session, self._workers))

    async def GetSession(
        self, request: router_pb2.GetSessionRequest, context: Context
    ) -> router_pb2.GetSessionResponse:
        session = await self._pipeline.sessions.get(self._tenant(context), request.id, "id")
        return router_pb2.GetSessionResponse(session=to_session(session, self._workers))

    async def CloseSession(
        self, request: router_pb2.CloseSessionRequest, context: Context
    ) -> router_pb2.CloseSessionResponse:
        await self._pipeline.sessions.close(self._tenant(context), request.id, "id")
        return router_pb2.CloseSessionResponse()

    def _tenant(self, context: Context) -> str:
        return _caller(context, dict(_metadata(context))).tenant

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        response = router_pb2.ListModelsResponse()
        registry = self._pipeline.registry
        for model, workers in sorted(registry.models().items()):
            response.models.add(id=model, context_length=registry.context_length(model), workers=len(workers))
        for lora in registry.loras.all():
            length = registry.context_length(lora.model)
            response.models.add(id=lora.name, context_length=length, workers=len(lora.workers), parent=lora.model)
        return response

    async def LoadLora(
        self, request: router_pb2.RouterLoadLoraRequest, context: Context
    ) -> router_pb2.RouterLoadLoraResponse:
        state = await self._adapters.load(request.name, request.path, request.model or None, pinned=request.pinned)
        return router_pb2.RouterLoadLoraResponse(lora=to_fleet_lora(state))

    async def UnloadLora(
        self, request: router_pb2.RouterUnloadLoraRequest, context: Context
    ) -> router_pb2.RouterUnloadLoraResponse:
        running = await self._adapters.unload(request.name, abort=request.abort_requests)
        return router_pb2.RouterUnloadLoraResponse(running_requests=running)

    async def ListLoras(
        self, request: router_pb2.RouterListLorasRequest, context: Context
    ) -> router_pb2.RouterListLorasResponse:
        return router_pb2.RouterListLorasResponse(loras=[to_fleet_lora(each) for each in self._adapters.list()])

    async def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: Context
    ) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(
            workers=[to_worker_status(each, self._workers) for each in self._status().workers]
        )

    async def GetStatus(self, request: router_pb2.GetStatusRequest, context: Context) -> router_pb2.GetStatusResponse:
        return to_status(self._status(), self._workers)

    async def RegisterWorker(
        self, request: router_pb2.RegisterWorkerRequest, context: Context
    ) -> router_pb2.RegisterWorkerResponse:
        host, colon, port = request.address.rpartition(":")
        is_url = request.address.startswith(("http://", "https://")) and host not in ("http", "https")
        if not is_url and (not host or not colon or not port.isdigit()):
            raise InvalidArgumentError(f"{request.address!r} is neither host:port nor a URL", field="address")
        lease = request.lease_seconds if request.HasField("lease_seconds") else None
        if lease is not None and not 0 < lease < math.inf:
            raise InvalidArgumentError("lease_seconds must be more than 0", field="lease_seconds")
        self._fleet.register(request.address, lease)
        return router_pb2.RegisterWorkerResponse()

    async def DrainWorker(
        self, request: router_pb2.DrainWorkerRequest, context: Context
    ) -> router_pb2.DrainWorkerResponse:
        in_flight = self._fleet.drain(request.address, not request.undo)
        return router_pb2.DrainWorkerResponse(in_flight=in_flight)

    async def RemoveWorker(
        self, request: router_pb2.RemoveWorkerRequest, context: Context
    ) -> router_pb2.RemoveWorkerResponse:
        self._fleet.remove(request.address)
        return router_pb2.RemoveWorkerResponse()

    async def PauseRequests(
        self, request: router_pb2.PauseRequestsRequest, context: Context
    ) -> router_pb2.PauseRequestsResponse:
        mode = to_pause_mode(request.mode)
        return router_pb2.PauseRequestsResponse(aborted=await self._steering.pause(mode))

    async def ResumeRequests(
        self, request: router_pb2.ResumeRequestsRequest, context: Context
    ) -> router_pb2.ResumeRequestsResponse:
        await self._steering.resume()
        return router_pb2.ResumeRequestsResponse()

    async def AbortRequests(
        self, request: router_pb2.AbortRequestsRequest, context: Context
    ) -> router_pb2.AbortRequestsResponse:
        if request.request_id:
            aborted = self._steering.abort(request.tenant, request.request_id)
        elif request.tenant:
            raise InvalidArgumentError("request_id is required where there is a tenant", field="request_id")
        else:
            aborted = self._steering.abort_all()
        return router_pb2.AbortRequestsResponse(aborted=aborted)

    async def ExplainRoute(
        self, request: router_pb2.ExplainRouteRequest, context: Context
    ) -> router_pb2.ExplainRouteResponse:
        pipeline = self._pipeline
        caller = _caller(context, dict(_metadata(context)))
        left = context.time_remaining()
        asked = (await self._contexts(request.request, new_request_id(), caller, left, RANDOM_SEEDS))[0]
        pipeline.registry.resolve(asked.model)  # also where there is nothing but backends, and no tokenizer
        await pipeline.prepare(asked)
        return to_explanation(explain(asked, pipeline.registry, pipeline.policies, pipeline.disaggregation))


def _give_up(call: PushCall) -> None:
    call.give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")


def _caller(context: Context, metadata: dict[str, str]) -> Caller:
    return caller_of(metadata.get, _as_push_call(context).tenant)


def _as_push_call(context: Context) -> PushCall:
    """The context, as every server here makes them."""
    return cast(PushCall, context)


def _metadata(context: Context) -> Iterator[tuple[str, str]]:
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield key, value
