"""SGLang's scheduler protocol (``sglang.grpc.scheduler.SglangScheduler``), so that gateways made for SGLang can route to us.

Its messages come from PyPI's ``smg-grpc-proto``, whose gateway is ``smg``. Each call is turned into one of ``sapwood.v1.Worker``
and served as that is.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import grpc
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from sapwood.v1 import worker_pb2
from sapwood_common.errors import ConfigError, InvalidArgumentError, UnavailableError, UnimplementedError
from sapwood_common.models.model_files import resolve_model
from sapwood_worker.config import WorkerConfig
from sapwood_worker.front.engine import Engine
from sapwood_worker.front.service import WorkerService
from sapwood_worker.front.sglang.sglang_convert import Answers, to_embed, to_generate, to_kv_batch

SERVICE = "sglang.grpc.scheduler.SglangScheduler"
UNCOUNTED = frozenset({f"/{SERVICE}/SubscribeKvEvents"})
"""Calls that last as long as the worker."""

_CHUNK = 1 << 20
"""Bytes of a tokenizer in one message."""
_HOW_TO_PROFILE = ("start_step", "num_steps", "activities", "with_stack", "record_shapes", "profile_by_stage")

Context = grpc.aio.ServicerContext[Any, Any]


class SglangService(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]
    """Implements the protocol except LoRA, which this worker does not serve.

    Args:
        worker: The worker's own service.
        engine: The way to the scheduler.
        config: The worker's.
        draining: Set when the worker is about to stop.
    """

    def __init__(self, worker: WorkerService, engine: Engine, config: WorkerConfig, draining: asyncio.Event) -> None:
        self._worker = worker
        self._engine = engine
        self._config = config
        self._draining = draining
        self._started = time.time()

    async def Generate(
        self, request: sglang_scheduler_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[sglang_scheduler_pb2.GenerateResponse]:
        """However the call ends, its request ends with it."""
        info = self._worker.loaded().info
        answers = Answers(request, frozenset(info.eos_token_ids) | frozenset(request.sampling_params.stop_token_ids))
        generation = await self._worker.start(to_generate(request), context.time_remaining())
        # A call that ends while its last message is being sent does not come back here.
        context.add_done_callback(cast(Any, lambda _: generation.close()))
        try:
            async for output in generation:
                for message in answers.of(output):
                    yield message
        finally:
            generation.close()

    async def Embed(
        self, request: sglang_scheduler_pb2.EmbedRequest, context: Context
    ) -> sglang_scheduler_pb2.EmbedResponse:
        vectors, prompt_tokens = await self._worker.embed(to_embed(request), context.time_remaining())
        values = vectors[0].tolist()
        return sglang_scheduler_pb2.EmbedResponse(
            embedding_dim=len(values), embedding=values, prompt_tokens=prompt_tokens
        )

    async def HealthCheck(
        self, request: sglang_scheduler_pb2.HealthCheckRequest, context: Context
    ) -> sglang_scheduler_pb2.HealthCheckResponse:
        problem = ""
        if self._draining.is_set():
            problem = "this worker is draining"
        elif self._worker.model is None:
            problem = "the model is being loaded"
        elif not self._engine.liveness.well:
            problem = "the scheduler process gives no sign of life"
        return sglang_scheduler_pb2.HealthCheckResponse(healthy=not problem, message=problem)

    async def Abort(
        self, request: sglang_scheduler_pb2.AbortRequest, context: Context
    ) -> sglang_scheduler_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidArgumentError("request_id is missing", field="request_id")
        found = self._engine.abort(request.request_id)
        message = "" if found else f"no request {request.request_id} is running"
        return sglang_scheduler_pb2.AbortResponse(success=found, message=message)

    async def GetModelInfo(
        self, request: sglang_scheduler_pb2.GetModelInfoRequest, context: Context
    ) -> sglang_scheduler_pb2.GetModelInfoResponse:
        name, info, *_ = self._worker.loaded()
        path = await self._path()
        return sglang_scheduler_pb2.GetModelInfoResponse(
            model_path=path,
            tokenizer_path=self._config.sglang.tokenizer or path,
            is_generation=info.generates,
            served_model_name=name,
            max_context_length=info.context_length,
            vocab_size=info.vocab_size,
            model_type=info.architecture,
            eos_token_ids=info.eos_token_ids,
            max_req_input_len=info.context_length - 1,
            default_sampling_params_json=json.dumps(info.sampling_defaults) if info.sampling_defaults else "",
        )

    async def GetServerInfo(
        self, request: sglang_scheduler_pb2.GetServerInfoRequest, context: Context
    ) -> sglang_scheduler_pb2.GetServerInfoResponse:
        name, info, _, _, max_running = self._worker.loaded()
        response = sglang_scheduler_pb2.GetServerInfoResponse(
            active_requests=self._engine.load.running_requests + self._engine.load.waiting_requests,
            uptime_seconds=time.time() - self._started,
            sglang_version=_own_version(),
            server_type="grpc",
            max_total_num_tokens=info.num_pages * info.page_size,
        )
        response.start_time.FromSeconds(int(self._started))
        response.server_args.update(
            {
                "model_path": await self._path(),
                "served_model_name": name,
                "page_size": info.page_size,
                "context_length": info.context_length,
                "max_running_requests": max_running,
                "tp_size": 1,
                "dp_size": 1,
            }
        )
        return response

    async def GetLoads(
        self, request: sglang_scheduler_pb2.GetLoadsRequest, context: Context
    ) -> sglang_scheduler_pb2.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidArgumentError(f"dp_rank is {request.dp_rank}; there is rank 0 only", field="dp_rank")
        _, info, _, _, max_running = self._worker.loaded()
        load = self._engine.load
        total = load.running_requests + load.waiting_requests
        usage = (load.used_pages - load.evictable_pages) / max(load.num_pages, 1)
        own = sglang_scheduler_pb2.SchedulerLoad(
            num_running_reqs=load.running_requests,
            num_waiting_reqs=load.waiting_requests,
            num_total_reqs=total,
            num_used_tokens=(load.used_pages - load.evictable_pages) * info.page_size,
            max_total_num_tokens=info.num_pages * info.page_size,
            token_usage=usage,
            cache_hit_rate=load.cached_tokens / max(load.prompt_tokens, 1),
            utilization=load.running_requests / max_running,
            max_running_requests=max_running,
            num_waiting_uncached_tokens=load.queued_tokens,
        )
        return sglang_scheduler_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=_own_version(),
            dp_rank_count=1,
            loads=[own],
            aggregate=sglang_scheduler_pb2.AggregateMetrics(
                total_running_reqs=load.running_requests,
                total_waiting_reqs=load.waiting_requests,
                total_reqs=total,
                avg_token_usage=usage,
                avg_utilization=own.utilization,
            ),
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Frees at once what no running request holds; ``timeout_s`` has nothing to wait for."""
        self._worker.loaded()
        freed = await self._engine.flush_cache()
        return common_pb2.FlushCacheResponse(success=True, message=f"{freed} pages freed")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        for field, _ in request.ListFields():
            if field.name in _HOW_TO_PROFILE:
                raise UnimplementedError(f"this worker does not serve {field.name}", field=field.name)
        asked = worker_pb2.StartProfileRequest(folder=request.output_dir)
        started = await self._worker.StartProfile(asked, context)
        return common_pb2.ProfileResponse(success=True, message=started.folder)

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        stopped = await self._worker.StopProfile(worker_pb2.StopProfileRequest(), context)
        return common_pb2.ProfileResponse(success=True, message=stopped.path)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        folder = self._config.sglang.tokenizer or await self._path()
        data = await asyncio.to_thread(tokenizer_bundle, Path(folder))
        for start in range(0, len(data), _CHUNK):
            last = start + _CHUNK >= len(data)
            digest = hashlib.sha256(data).hexdigest() if last else ""
            yield common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK], sha256=digest)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Begins with a snapshot of the cache, regardless of the events that the subscriber has seen; the numbers continue after
        those."""
        block_size = self._worker.loaded().info.page_size
        number = request.start_sequence_number
        async with aclosing(self._worker.kv_batches()) as batches:
            async for batch in batches:
                number += 1
                yield to_kv_batch(batch, number, block_size)
        raise UnavailableError("this worker is shutting down", retry_after=1.0)

    async def ListLoadedLoRAAdapters(
        self, request: sglang_scheduler_pb2.ListLoadedLoRAAdaptersRequest, context: Context
    ) -> sglang_scheduler_pb2.ListLoadedLoRAAdaptersResponse:
        return sglang_scheduler_pb2.ListLoadedLoRAAdaptersResponse()

    async def LoadLoRAAdapter(self, request: Any, context: Context) -> Any:
        raise UnimplementedError("this worker serves no LoRA")

    async def UnloadLoRAAdapter(self, request: Any, context: Context) -> Any:
        raise UnimplementedError("this worker serves no LoRA")

    async def _path(self) -> str:
        """Where the model is, or what the configuration calls it if it is not on this machine."""
        config = self._config
        find = partial(resolve_model, config.model, config.revision, weights=False, may_fetch=False)
        try:
            return str(await asyncio.to_thread(find))
        except ConfigError:
            return config.model


def add_to(
    grpc_server: Any, worker: WorkerService, engine: Engine, config: WorkerConfig, draining: asyncio.Event
) -> None:
    """Adds the protocol to a gRPC server that serves the worker's own; takes the arguments of :class:`SglangService`."""
    service = SglangService(worker, engine, config, draining)
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(service, grpc_server)


def _own_version() -> str:
    return f"sapwood {version('sapwood')}"


# A model's tokenizer files as one archive, for gateways that do not have the model's folder.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAME_DATE = (1980, 1, 1, 0, 0, 0)


def tokenizer_bundle(folder: Path) -> bytes:
    """The tokenizer files of a folder, zipped; equal files give equal bytes.

    Reads and packs megabytes: not for an event loop.

    Raises:
        UnimplementedError: It is one file, or has no tokenizer.
    """
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    if not any(file.name.startswith("tokenizer.") for file in files):
        raise UnimplementedError(
            f"{folder.name} has no tokenizer files for gateways: give the worker --sglang on,tokenizer=FOLDER"
        )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            packed.writestr(zipfile.ZipInfo(file.name, _SAME_DATE), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()
