"""SGLang's paths."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sapwood_common.errors import UnimplementedError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.edges.sglang.control import Control
from sapwood_router.edges.sglang.generate import Generated, generate
from sapwood_router.edges.sglang.request import GenerateRequest
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.steering import Steering
from sapwood_router.observe.status import RouterState


class ModelInfo(msgspec.Struct):
    """The answer of ``/get_model_info`` about the only model."""

    model_path: str
    tokenizer_path: str
    is_generation: bool = True


async def refuse_concatenation(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Refuses to join requests' keys and values: an answer would not be the one to the joined text.

    Raises:
        UnimplementedError: Always.
    """
    raise UnimplementedError(
        "requests' keys and values are not joined; SGLang's language joins texts with "
        "sglang.global_config.enable_parallel_encoding = False"
    )


def sglang_routes(
    pipeline: Pipeline, steering: Steering | None, status: Callable[[], RouterState] | None
) -> list[Route]:
    """The routes.

    Args:
        pipeline: Knows the models.
        steering: The routes that affect all clients' requests; None: only operators may use these.
        status: How the router and its workers are; None: that is for operators.
    """

    async def show_model(exchange: Exchange) -> None:
        model = pipeline.registry.resolve(None)
        await exchange.send_body(200, msgspec.json.encode(ModelInfo(model, model)))

    routes: list[Route] = [
        Post(
            "/generate",
            generate,
            summary="Goes on with texts, SGLang's way",
            takes=(GenerateRequest,),
            gives=Generated,
            streams=True,
        ),
        *(
            Ask(path, show_model, summary="Tells the model's name", gives=ModelInfo)
            for path in ("/get_model_info", "/model_info")
        ),
    ]
    routes += Control(pipeline, status, steering).routes()
    routes.append(
        Post(
            "/concate_and_append_request",
            refuse_concatenation,
            summary="Is refused: keys and values that were computed at other places are not joined",
            takes=(),
        )
    )
    if steering is not None:
        flush = steering.flush

        async def flush_cache(exchange: Exchange) -> None:
            freed = await flush()
            body = f"Cache flushed: {freed} pages freed.\n".encode()
            await exchange.send_page(200, ((b"content-type", b"text/plain; charset=utf-8"),), body)

        summary = "Empties the workers' caches of prefixes"
        # Not by GET, which any web page has a browser send without saying whose page it is.
        routes.append(Ask("/flush_cache", flush_cache, "POST", summary=summary))
    return routes
