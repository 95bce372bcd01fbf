"""The worker's gRPC front."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import grpc
import numpy as np
import numpy.typing as npt

from sapwood.v1 import worker_pb2, worker_pb2_grpc
from sapwood_common.contract.seeds import Seeds
from sapwood_common.errors import InvalidArgumentError, UnavailableError, UnimplementedError
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.settings.flags import service_flag
from sapwood_common.telemetry.logs import TRACEPARENT_KEY, is_valid_traceparent, traceparent_var
from sapwood_net.pacing.pace import Pace
from sapwood_worker.front.convert import (
    check_prompt,
    to_continuations,
    to_dimensions,
    to_handoff,
    to_inputs,
    to_kv_events,
    to_load_report,
    to_lora_info,
    to_lora_infos,
    to_namespace,
    to_pooling,
    to_response,
    to_role,
    to_sampling,
    to_terms,
    to_tier_names,
    to_tier_stats,
)
from sapwood_worker.front.engine import Engine, Generation
from sapwood_worker.front.kv_event_stream import KvEventBatch
from sapwood_worker.front.loras import KnownLora, Loras, LoraUseTicket, aborted
from sapwood_worker.front.pictures import to_pictures
from sapwood_worker.front.served_model import ServedModel, to_model_info
from sapwood_worker.front.session import LoraNews, Session
from sapwood_worker.front.sleep import Sleeper, to_memory
from sapwood_worker.front.weights import Weights
from sapwood_worker.records.load import TierReport

SERVICE = "sapwood.v1.Worker"
UNCOUNTED = frozenset(f"/{SERVICE}/{method}" for method in ("WatchLoad", "Session", "SubscribeKvEvents"))
"""Calls that last as long as the worker: a drain does not wait for them, they end by themselves."""

_EMBED = f"/{SERVICE}/Embed"
_TOKENS_A_TURN = 32_768
"""Tokens of a request to embed that are checked in one turn of the event loop, which takes 2 ms."""
MOST_NAME = 128
"""Characters of a pin's name."""
DEFAULT_INTERVAL_MS, LEAST_INTERVAL_MS = 100, 10

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Implements ``sapwood.v1.Worker``; see the proto for what each method does.

    Args:
        engine: The way to the scheduler.
        draining: Set when the service is about to stop or was asked to drain.
        begin_drain: Sets it and turns the service unhealthy.
        telemetry: Measures what comes over sessions.
        seeds: Draws the seeds of requests that bring none.
        loras: The adapters.

    Attributes:
        weights: The model's weights, and updates of them.
        sleeper: Which memory sleeps.
        model: Set once it is loaded; until then calls are refused UNAVAILABLE.
    """

    def __init__(
        self,
        engine: Engine,
        draining: asyncio.Event,
        begin_drain: Callable[[], Awaitable[None]],
        telemetry: RpcTelemetry,
        seeds: Seeds,
        loras: Loras,
    ) -> None:
        self._seeds = seeds
        self._loras = loras
        self._telemetry = telemetry
        self._engine = engine
        self._draining = draining
        self._begin_drain = begin_drain
        self.weights = Weights(engine)
        self.sleeper = Sleeper(engine)
        self.model: ServedModel | None = None
        self._sessions: set[Session] = set()
        self._idle = asyncio.Event()

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Streams tokens. However the call ends, cancelled, past its deadline or broken, its request ends with it."""
        generation = await self.start(request, context.time_remaining())
        # A call that ends while its last message is being sent does not come back here.
        context.add_done_callback(cast(Any, lambda _: generation.close()))
        try:
            async for output in generation:
                yield to_response(output, generation.lora_digest, generation.weight_version(output))
        finally:
            generation.close()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Context) -> worker_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidArgumentError("request_id is missing", field="request_id")
        return worker_pb2.AbortResponse(found=self._engine.abort(request.request_id))

    async def GetModelInfo(
        self, request: worker_pb2.GetModelInfoRequest, context: Context
    ) -> worker_pb2.GetModelInfoResponse:
        return self._info()

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        session = Session(
            self.start,
            self._embed_measured,
            self._engine,
            self._info,
            self._epoch,
            self._draining,
            self._session_idle,
            self._loras,
        )
        # A call that ends while a message is being sent does not come back here.
        context.add_done_callback(cast(Any, lambda _: session.close()))
        self._sessions.add(session)
        try:
            async for response in session.responses(request_iterator):
                yield response
        finally:
            session.close()
            self._sessions.discard(session)
            self._session_idle()

    async def wait_idle(self) -> None:
        """Returns once no session has a generation running."""
        while not all(session.idle for session in self._sessions):
            self._idle.clear()
            await self._idle.wait()

    def _epoch(self) -> int | None:
        return None if self.model is None else self.model.epoch

    def _session_idle(self) -> None:
        self._idle.set()

    async def start(self, request: worker_pb2.WorkerGenerateRequest, seconds: float | None) -> Generation:
        """Checks a request and submits it; the caller reads it to its end or closes it.

        Args:
            request: The request.
            seconds: Seconds to its deadline; None if it has none.

        Raises:
            InvalidArgumentError: It cannot be run; the field is named.
            NotFoundError: There is no such adapter.
            UnavailableError: The model is being loaded, or the worker drains.
        """
        _, info, _, grammars, _ = self.loaded()
        if self._draining.is_set():
            raise UnavailableError("this worker is draining", retry_after=1.0)
        self.sleeper.check()
        check_prompt(request, info)
        sampling, count = to_sampling(request, info, self._seeds)
        handoff = to_handoff(request, self._engine.roles, count)
        continuations = to_continuations(request, info, count)
        with self._engine.preparing():
            held = await self._hold(request)
            try:
                terms = to_terms(request, seconds, None if held is None else held.loaded)
                grammar = await grammars.compiled(request, seconds)
                pictures = await to_pictures(request, info)
                generation = self._engine.submit(
                    request.request_id,
                    request.token_ids,
                    sampling,
                    grammar,
                    request.output_tokens,
                    count,
                    request.traceparent if is_valid_traceparent(request.traceparent) else traceparent_var.get(),
                    terms,
                    handoff,
                    _nothing if held is None else held.release,
                    pictures,
                    continuations,
                )
            except BaseException:
                if held is not None:
                    held.release()
                raise
        if held is not None:
            generation.lora_digest = held.loaded.facts.digest
            held.on_abort(lambda: generation.fail(aborted(request.lora_name)))
        return generation

    async def _hold(
        self, request: worker_pb2.WorkerGenerateRequest | worker_pb2.WorkerEmbedRequest
    ) -> LoraUseTicket | None:
        """Holds the adapter that a request names, loading it if need be; None: it names none. Raises as :meth:`Loras.use`."""
        if not request.lora_name:
            return None
        return await self._loras.use(
            request.lora_name, request.lora_source if request.HasField("lora_source") else None
        )

    def _info(self) -> worker_pb2.GetModelInfoResponse:
        return to_model_info(
            self.loaded(),
            self._engine.roles[-1],
            self._engine.page_fingerprint,
            resolves_loras=self._loras.resolves,
            weights=self.weights.state,
            asleep=self.sleeper.asleep,
        )

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Pushes the load until the client goes or the worker drains."""
        interval = request.interval_ms if request.HasField("interval_ms") else DEFAULT_INTERVAL_MS
        if 0 < interval < LEAST_INTERVAL_MS:
            raise InvalidArgumentError(
                f"interval_ms is {interval}; it must be 0 or at least {LEAST_INTERVAL_MS}", field="interval_ms"
            )
        self.loaded()
        engine = self._engine
        draining = asyncio.ensure_future(self._draining.wait())
        change: asyncio.Future[None] | None = None
        news = LoraNews(self._loras)
        try:
            while not draining.done():
                version = engine.load_version
                report = to_load_report(engine.load, engine.kv_events)
                yield worker_pb2.WatchLoadResponse(load=report, loras=news.report())
                if interval:
                    await asyncio.wait({draining}, timeout=interval / 1000)
                change = asyncio.ensure_future(engine.load_after(version))
                await asyncio.wait({change, draining}, timeout=news.due, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            draining.cancel()
            if change is not None:
                change.cancel()
        raise UnavailableError("this worker is shutting down", retry_after=1.0)

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        self.loaded()
        return worker_pb2.FlushCacheResponse(freed_pages=await self._engine.flush_cache())

    async def GetCacheStats(
        self, request: worker_pb2.GetCacheStatsRequest, context: Context
    ) -> worker_pb2.GetCacheStatsResponse:
        self.loaded()
        return worker_pb2.GetCacheStatsResponse(tiers=to_tier_stats(await self._engine.cache_command("stats")))

    async def GetExpertLoad(
        self, request: worker_pb2.GetExpertLoadRequest, context: Context
    ) -> worker_pb2.GetExpertLoadResponse:
        info, load = self.loaded().info, self._engine.experts
        answer = worker_pb2.GetExpertLoadResponse(
            tokens=load.tokens, balance=load.balance, tiles=info.expert_tiles, tile_sizes=info.expert_tile_sizes
        )
        if (places := load.places) is not None:
            answer.ranks, answer.rank_balance, answer.moves = places.ranks, places.balance, places.moves
            answer.exchanged_bytes = places.exchanged_bytes
            answer.layers.extend(worker_pb2.ExpertSlots(experts=slots) for slots in places.slots)
        return answer

    async def ClearCache(
        self, request: worker_pb2.ClearCacheRequest, context: Context
    ) -> worker_pb2.ClearCacheResponse:
        self.loaded()
        reports: list[TierReport] = []
        for tier in to_tier_names(request):
            reports = await self._engine.cache_command("clear", tier)
        return worker_pb2.ClearCacheResponse(tiers=to_tier_stats(reports))

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Context) -> worker_pb2.SetRoleResponse:
        """Changes what the worker does of a request; its sessions tell it with their next message."""
        self.loaded()
        await self._engine.set_role(to_role(request.role))
        self._tell_info()
        return worker_pb2.SetRoleResponse()

    async def AttachStorage(
        self, request: worker_pb2.AttachStorageRequest, context: Context
    ) -> worker_pb2.AttachStorageResponse:
        """Attaches a store; returns when the store is attached, or fails with the store's error and keeps trying."""
        self.loaded()
        if not request.url:
            raise InvalidArgumentError("url is missing", field="url")
        return worker_pb2.AttachStorageResponse(
            tiers=to_tier_stats(await self._engine.cache_command("attach", request.url))
        )

    async def DetachStorage(
        self, request: worker_pb2.DetachStorageRequest, context: Context
    ) -> worker_pb2.DetachStorageResponse:
        self.loaded()
        return worker_pb2.DetachStorageResponse(tiers=to_tier_stats(await self._engine.cache_command("detach")))

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        """Pushes what is cached until the client goes or the worker drains."""
        block_size = self.loaded().info.page_size
        token_ids = request.token_ids if request.HasField("token_ids") else True
        async with aclosing(self.kv_batches()) as batches:
            async for batch in batches:
                yield to_kv_events(batch, block_size, self._loras.name_of, token_ids=token_ids)
        raise UnavailableError("this worker is shutting down", retry_after=1.0)

    async def kv_batches(self) -> AsyncGenerator[KvEventBatch]:
        """Yields a snapshot of the cache and then each change; ends when the worker drains."""
        batches = self._engine.kv_events.subscribe()
        draining = asyncio.ensure_future(self._draining.wait())
        upcoming: asyncio.Future[KvEventBatch] | None = None
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(batches))
                await asyncio.wait({upcoming, draining}, return_when=asyncio.FIRST_COMPLETED)
                if draining.done():
                    break
                yield upcoming.result()
        finally:
            draining.cancel()
            if upcoming is not None and not upcoming.done():
                upcoming.cancel()
                await asyncio.wait({upcoming})
            await batches.aclose()

    async def PinPrefix(self, request: worker_pb2.PinPrefixRequest, context: Context) -> worker_pb2.PinPrefixResponse:
        self.loaded()
        if not 0 < len(request.name) <= MOST_NAME:
            raise InvalidArgumentError(f"name must have 1 to {MOST_NAME} characters", field="name")
        namespace = to_namespace(request.cache_salt, self._loras.held(request.lora_name) if request.lora_name else None)
        seconds = float(request.ttl_seconds) if request.HasField("ttl_seconds") else None
        pinned = await self._engine.pin(request.name, request.token_ids, namespace, seconds)
        return worker_pb2.PinPrefixResponse(pinned_tokens=pinned)

    async def UnpinPrefix(
        self, request: worker_pb2.UnpinPrefixRequest, context: Context
    ) -> worker_pb2.UnpinPrefixResponse:
        self.loaded()
        return worker_pb2.UnpinPrefixResponse(found=await self._engine.unpin(request.name))

    async def Pause(self, request: worker_pb2.PauseRequest, context: Context) -> worker_pb2.PauseResponse:
        self.loaded()
        aborted = await self._engine.pause(retract=request.retract, abort=request.abort)
        return worker_pb2.PauseResponse(aborted=aborted)

    async def Resume(self, request: worker_pb2.ResumeRequest, context: Context) -> worker_pb2.ResumeResponse:
        self.loaded()
        await self._engine.resume()
        return worker_pb2.ResumeResponse()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        await self._begin_drain()
        await self._engine.wait_idle()
        return worker_pb2.DrainResponse()

    async def StartProfile(
        self, request: worker_pb2.StartProfileRequest, context: Context
    ) -> worker_pb2.StartProfileResponse:
        self.loaded()
        folder = request.folder or tempfile.mkdtemp(prefix="sapwood-profile-")
        await self._engine.start_profile(folder)
        return worker_pb2.StartProfileResponse(folder=folder)

    async def StopProfile(
        self, request: worker_pb2.StopProfileRequest, context: Context
    ) -> worker_pb2.StopProfileResponse:
        self.loaded()
        return worker_pb2.StopProfileResponse(path=await self._engine.stop_profile())

    async def Embed(self, request: worker_pb2.WorkerEmbedRequest, context: Context) -> worker_pb2.WorkerEmbedResponse:
        """Embeds all inputs. A call that is cancelled takes its inputs out of the scheduler."""
        vectors, prompt_tokens = await self.embed(request, context.time_remaining())
        return worker_pb2.WorkerEmbedResponse(
            embeddings=[worker_pb2.Embedding(values=vector.tolist()) for vector in vectors],
            prompt_tokens=prompt_tokens,
        )

    async def _embed_measured(
        self, request: worker_pb2.WorkerEmbedRequest, seconds: float | None
    ) -> tuple[npt.NDArray[np.float32], int]:
        """Embeds what came over a session, and counts, times and traces it as if it were a call of its own."""
        running = self._telemetry.begin(_EMBED, ((TRACEPARENT_KEY, request.traceparent),))
        ended: BaseException | None = None
        try:
            return await self.embed(request, seconds)
        except BaseException as error:
            ended = error
            raise
        finally:
            running.end(ended)

    async def embed(
        self, request: worker_pb2.WorkerEmbedRequest, seconds: float | None
    ) -> tuple[npt.NDArray[np.float32], int]:
        """The vectors of all inputs, and the number of their tokens. Raises as :meth:`start`."""
        info = self.loaded().info
        if self._draining.is_set():
            raise UnavailableError("this worker is draining", retry_after=1.0)
        self.sleeper.check()
        inputs: list[list[int]] = []
        pace = Pace(partial(asyncio.sleep, 0), _TOKENS_A_TURN)
        for ids in to_inputs(request, info):
            inputs.append(ids)
            await pace.did(len(ids))
        self._engine.check()
        pooling, dimensions = to_pooling(request.pooling, info), to_dimensions(request, info)
        normalize = request.normalize if request.HasField("normalize") else info.normalizes
        held = await self._hold(request)
        try:
            terms = to_terms(request, seconds, None if held is None else held.loaded)
            name = request.request_id or "embed"
            work = self._engine.embeddings.embed(
                name, inputs, pooling, terms, dimensions=dimensions, normalize=normalize
            )
            return await _unless_aborted(work, request.lora_name, held), sum(map(len, inputs))
        finally:
            if held is not None:
                held.release()

    async def LoadLora(self, request: worker_pb2.LoadLoraRequest, context: Context) -> worker_pb2.LoadLoraResponse:
        """Loads an adapter; a call that is cancelled does not stop the load."""
        self._serves_loras()
        loading: asyncio.Future[KnownLora | None]
        if request.only_replace:
            loading = asyncio.ensure_future(self._loras.replace(request.name, request.path, request.version))
        else:
            version = request.version if request.HasField("version") else None
            loading = asyncio.ensure_future(
                self._loras.load(request.name, request.path, pinned=request.pinned, version=version)
            )
        draining = asyncio.ensure_future(self._draining.wait())
        ends: set[asyncio.Future[Any]] = {loading, draining}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise UnavailableError("this worker is shutting down")
            known = loading.result()
        finally:
            loading.cancel()
            draining.cancel()
        if known is None:
            return worker_pb2.LoadLoraResponse()
        return worker_pb2.LoadLoraResponse(lora=to_lora_info(known, self._loras, self._loras.uses()))

    async def UnloadLora(
        self, request: worker_pb2.UnloadLoraRequest, context: Context
    ) -> worker_pb2.UnloadLoraResponse:
        self._serves_loras()
        running = self._loras.unload(request.name, abort=request.abort_requests)
        return worker_pb2.UnloadLoraResponse(running_requests=running)

    async def ListLoras(self, request: worker_pb2.ListLorasRequest, context: Context) -> worker_pb2.ListLorasResponse:
        loras, loads = self._loras, self._engine.load.loras
        return worker_pb2.ListLorasResponse(
            loras=to_lora_infos(loras),
            slots=loras.slots,
            free_slots=loras.slots if loads is None else loads.unused,
            host_bytes=loras.host_bytes,
            host_budget=loras.budget,
        )

    async def UpdateWeights(
        self, request_iterator: AsyncIterator[worker_pb2.UpdateWeightsRequest], context: Context
    ) -> worker_pb2.UpdateWeightsResponse:
        self.loaded()
        if worker_pb2.MEMORY_WEIGHTS in self.sleeper.asleep:
            self.sleeper.check()
        response = await self.weights.update(request_iterator)
        if response.committed:
            self._tell_info()
        return response

    async def Sleep(self, request: worker_pb2.SleepRequest, context: Context) -> worker_pb2.SleepResponse:
        self.loaded()
        size = await self.sleeper.sleep(to_memory(request.memory), abort=request.abort)
        self._tell_info()
        return worker_pb2.SleepResponse(asleep=self.sleeper.asleep, bytes=size)

    async def WakeUp(self, request: worker_pb2.WakeUpRequest, context: Context) -> worker_pb2.WakeUpResponse:
        self.loaded()
        await self.sleeper.wake_up(to_memory(request.memory))
        self._tell_info()
        return worker_pb2.WakeUpResponse(asleep=self.sleeper.asleep)

    def _tell_info(self) -> None:
        for session in self._sessions:
            session.info_changed()

    async def JoinWeightsGroup(
        self, request: worker_pb2.JoinWeightsGroupRequest, context: Context
    ) -> worker_pb2.JoinWeightsGroupResponse:
        self.loaded()
        await self.weights.join_group(request)
        return worker_pb2.JoinWeightsGroupResponse()

    async def LeaveWeightsGroup(
        self, request: worker_pb2.LeaveWeightsGroupRequest, context: Context
    ) -> worker_pb2.LeaveWeightsGroupResponse:
        self.loaded()
        return worker_pb2.LeaveWeightsGroupResponse(found=await self.weights.leave_group(request.group))

    async def DropWeights(
        self, request: worker_pb2.DropWeightsRequest, context: Context
    ) -> worker_pb2.DropWeightsResponse:
        self.loaded()
        return worker_pb2.DropWeightsResponse(found=await self.weights.drop(request.update_id))

    async def GetWeights(
        self, request: worker_pb2.GetWeightsRequest, context: Context
    ) -> worker_pb2.GetWeightsResponse:
        self.loaded()
        return worker_pb2.GetWeightsResponse(weights=self.weights.state, staged=self.weights.staged)

    def _serves_loras(self) -> None:
        self.loaded()
        if not self._loras.slots:
            flag = service_flag("worker", "lora-slots")
            raise UnimplementedError(f"this worker has no slots for adapters: {flag} gives it some")

    def loaded(self) -> ServedModel:
        """The model that is served; raises UnavailableError until it is loaded."""
        if self.model is None:
            raise UnavailableError("the model is being loaded", retry_after=1.0)
        return self.model


def _nothing() -> None:
    """Is done at the end of a request without an adapter."""


async def _unless_aborted(
    work: Coroutine[Any, Any, npt.NDArray[np.float32]], name: str, held: LoraUseTicket | None
) -> npt.NDArray[np.float32]:
    """The result of ``work``; RequestCancelledError if its adapter is unloaded meanwhile and its requests are to end."""
    if held is None:
        return await work
    task = asyncio.ensure_future(work)
    ended = asyncio.get_running_loop().create_future()
    held.on_abort(lambda: None if ended.done() else ended.set_result(None))
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise aborted(name)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
