"""SGLang's calls that look at the server or steer it: what runs, whether it generates, aborting and pausing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError, SapwoodError, UnavailableError
from sapwood_router.edges.guard import tenant_var
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.routes import Answerer, Ask, Post, Route
from sapwood_router.edges.sending import Running, collect
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.steering import PauseMode, Steering
from sapwood_router.observe.status import RouterState, WorkerState
from sapwood_router.request.caller import caller_of
from sapwood_router.request.context import FieldNames, RequestContext, TokenPrompt, unique_id
from sapwood_router.request.output import OutputOptions

_SECONDS = 20.0
"""For a token to be generated."""
_FIELDS = FieldNames(prompt="prompt")


class AbortRequest(msgspec.Struct):
    """``POST /abort_request``: the request with this id, or all."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseRequest(msgspec.Struct):
    """``POST /pause_generation``: running requests are aborted or stopped, and new ones wait."""

    mode: PauseMode = PauseMode.ABORT


class Control:
    """The paths.

    Args:
        pipeline: Runs the requests.
        status: How the router and its workers are; None: that is for operators.
        steering: By which clients may abort others' requests and pause; None: that is for operators.
    """

    def __init__(self, pipeline: Pipeline, status: Callable[[], RouterState] | None, steering: Steering | None) -> None:
        self._pipeline = pipeline
        self._status = status
        self._steering = steering

    def routes(self) -> list[Route]:
        """The routes."""
        routes: list[Route] = [
            Post("/abort_request", self.abort, summary="Ends a request early", takes=(AbortRequest,)),
            Ask("/health_generate", self.show_health, summary="Tells whether a token can be generated"),
            *(
                Ask(path, self.show_server, summary="Tells what is served, SGLang's way")
                for path in ("/server_info", "/get_server_info")
            ),
        ]
        if self._status is not None:
            routes.append(Ask("/get_load", self.show_load, summary="Tells how busy each worker is, SGLang's way"))
        if self._steering is not None:
            pause, resume = self._pausing(self._steering)
            routes += [
                Post(
                    "/pause_generation",
                    pause,
                    summary="Ends all requests early, or has them stand still, and holds back new ones",
                    takes=(PauseRequest,),
                ),
                Post("/continue_generation", resume, summary="Lets requests go on after a pause"),
            ]
        return routes

    async def abort(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Aborts a request of the caller's own, or all requests; their answers are what there is of them.

        Raises:
            HttpError: All is for operators: 403.
        """
        request = convert(decode_object(body or b"{}"), AbortRequest, {}, left_out=exchange.left_out)
        if request.abort_all:
            if self._steering is None:
                raise HttpError(403, "to abort all requests is for operators", field="abort_all")
            count = self._steering.abort_all()
        elif request.rid:
            count = pipeline.running.abort(exchange.tenant, request.rid)
        else:
            raise InvalidArgumentError("rid is required, or abort_all", field="rid")
        await exchange.send_body(200, msgspec.json.encode({"success": True, "aborted": count}))

    @staticmethod
    def _pausing(steering: Steering) -> tuple[Answerer, Answerer]:
        async def pause(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
            request = convert(decode_object(body or b"{}"), PauseRequest, {}, left_out=exchange.left_out)
            count = await steering.pause(request.mode)
            await exchange.send_body(200, msgspec.json.encode({"status": "ok", "aborted": count}))

        async def resume(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
            await steering.resume()
            await exchange.send_body(200, b'{"status":"ok"}')

        return pause, resume

    async def show_health(self, exchange: Exchange) -> None:
        """Generates a token with each model.

        Raises:
            UnavailableError: One does not answer.
        """
        deadline = exchange.deadline(_SECONDS)
        registry = self._pipeline.registry
        models = [
            model
            for model, workers in registry.models().items()
            if workers and registry.labels(model) is None and not registry.relays(model)
        ]
        if not models:
            raise UnavailableError("no worker that generates is available", retry_after=1.0)
        for model in models:
            context = RequestContext(
                request_id=exchange.request_id,
                worker_request_id=unique_id(exchange.request_id),
                prompt=TokenPrompt([0]),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                output=OutputOptions(),
                fields=_FIELDS,
                caller=caller_of(lambda key: "", tenant_var.get()),
                deadline=deadline,
                model=model,
                whole=True,
                detokenize=False,
            )
            try:
                async with Running(exchange, self._pipeline, [context]) as runs:
                    await collect(runs)
            except SapwoodError as error:
                raise UnavailableError(f"{model} does not generate: {error.message}", retry_after=1.0) from error
            finally:
                exchange.close()  # the next one watches the client
        await exchange.send_body(200, b'{"status":"ok"}')

    async def show_server(self, exchange: Exchange) -> None:
        """Returns the facts that SGLang's clients read: names, lengths, and for workers the data of ``/status``."""
        contexts = self._pipeline.registry.context_lengths()
        first = next(iter(sorted(contexts)), "")
        body: dict[str, Any] = {
            "version": version("sapwood"),
            "status": "paused" if self._pipeline.running.paused else "ready",
            "model_path": first,
            "tokenizer_path": first,
            "served_model_name": first,
            "context_length": contexts.get(first),
            "models": [{"model": model, "context_length": contexts[model]} for model in sorted(contexts)],
        }
        if self._status is not None:
            body["internal_states"] = [self._state_of(worker) for worker in self._status().workers]
            body["max_total_num_tokens"] = sum(each["max_total_num_tokens"] for each in body["internal_states"])
        await exchange.send_body(200, msgspec.json.encode(body))

    async def show_load(self, exchange: Exchange) -> None:
        """Tells the last report of each worker."""
        assert self._status is not None, "else there is no such path"
        body = [
            {
                "dp_rank": index,
                "num_reqs": worker.load.running_requests + worker.load.waiting_requests,
                "num_waiting_reqs": worker.load.waiting_requests,
                "num_tokens": worker.load.queued_tokens,
            }
            for index, worker in enumerate(self._status().workers)
        ]
        await exchange.send_body(200, msgspec.json.encode(body))

    def _state_of(self, worker: WorkerState) -> dict[str, Any]:
        load = worker.load
        page = min(self._pipeline.registry.page_sizes(worker.model), default=0)
        return {
            "model": worker.model,
            "state": worker.state,
            "last_gen_throughput": worker.tokens_per_second,
            "num_running_reqs": load.running_requests,
            "num_waiting_reqs": load.waiting_requests,
            "token_usage": worker.used_share or 0.0,
            "cache_hit_rate": worker.hit_rate or 0.0,
            "max_total_num_tokens": load.num_pages * page,
        }
