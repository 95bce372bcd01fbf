"""The whole tokenizer service: loads, listens, drains."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

from sapwood.v1 import tokenizer_pb2_grpc
from sapwood_common.errors import ConfigError, UnavailableError
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.serving.server import ServiceServer, serve_until_stopped
from sapwood_common.settings.config import refuse_idle
from sapwood_common.settings.needs import Needs
from sapwood_common.telemetry.logs import announce, setup_logging
from sapwood_common.telemetry.metrics import MetricSet, MetricsServer, metrics_port
from sapwood_common.telemetry.tracing_start import start_tracing
from sapwood_net.sockets.tls import server_tls
from sapwood_text.vocabulary import Vocabulary
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_tokenizer.encode.batch_encoder import Library
from sapwood_tokenizer.encode.encode_process import start_library
from sapwood_tokenizer.encode.encoder import Encoder, EncoderOptions
from sapwood_tokenizer.encode.fast_library import make_library
from sapwood_tokenizer.encode.pair_template import read_pair_template
from sapwood_tokenizer.encode.pipeline import is_bounded
from sapwood_tokenizer.pictures.fetching import Fetcher
from sapwood_tokenizer.pictures.preparer import PictureLimits, Preparer, start_preparer
from sapwood_tokenizer.serve.compile_grammar import Grammars, build_grammars
from sapwood_tokenizer.serve.metrics import add_metrics
from sapwood_tokenizer.serve.process_group import ProcessGroup, reserve_port
from sapwood_tokenizer.serve.renderer import start_renderer
from sapwood_tokenizer.serve.service import DETOKENIZE, SERVICE, Limits, TokenizerService
from sapwood_tokenizer.template.parser_defaults import ParserDefaults, parser_defaults
from sapwood_tokenizer.vocab.loader import (
    LoadedTokenizer,
    load_tokenizer,
    resolve_tokenizer,
    tokenizer_name,
    vocabulary_of,
)

logger = logging.getLogger(__name__)

USUAL_METRICS_PORT = 9152

_SWITCH_SECONDS = 0.0005
"""Seconds after which a thread hands the interpreter on. With Python's own 5 ms, a long template delays every other request by
twice that: once at its arrival and once at its answer."""

_MOST_THREADS = 8
"""The most encoding threads unless the configuration says otherwise: the event loop cannot feed more."""


def build_encoder(loaded: LoadedTokenizer, config: TokenizerConfig, library: Library | None = None) -> Encoder:
    """The encoder as configured.

    Args:
        loaded: The tokenizer.
        config: The settings.
        library: Encodes; None: the one that is configured.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """
    # The encoder spreads texts over its own threads, and the library's would compete with them. The library reads this at each
    # call.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Encoder(
        loaded.tokenizer,
        EncoderOptions(
            max_text_bytes=config.max_text_bytes.bytes,
            max_text_tokens=config.max_text_bytes.tokens,
            threads=config.encoder.threads or min(_MOST_THREADS, os.cpu_count() or 1),
            exact_cache_bytes=int(config.cache_mb.exact * 2**20),
            prefix_cache_bytes=int(config.cache_mb.prefix * 2**20),
        ),
        library or make_library(config.encoder.library, loaded.tokenizer, loaded.origin),
    )


OF_ENCODERS = (
    Needs(
        ("tool_parser", "reasoning_parser", "max_open_streams", "grammar_timeout"),
        lambda config: False,
        "with a model that makes embeddings only",
    ),
)


@dataclass(frozen=True, slots=True)
class Model:
    """The model's files as read before anything is served."""

    name: str
    loaded: LoadedTokenizer
    vocabulary: Vocabulary | None
    parsers: ParserDefaults
    grammars: Grammars
    path: Path


async def build_preparer(config: TokenizerConfig, model: Model) -> Preparer | None:
    """What prepares pictures as configured; None: the model takes none, its files do not say how, or they are turned off."""
    given = config.pictures
    if not given.on:
        return None
    limits = PictureLimits(
        most=given.most,
        max_bytes=given.max_bytes,
        max_pixels=given.max_pixels,
        seconds=given.seconds,
        processes=given.processes,
        memory_bytes=given.memory_mb << 20,
        request_bytes=int(given.max_mb * 2**20),
        held_bytes=int(given.held_mb * 2**20),
        cache_bytes=int(given.cache_mb * 2**20),
        frames=given.frames,
        video_seconds=given.video_seconds,
    )
    hosts = [host for host in given.hosts.split(";") if host]
    fetcher = Fetcher(hosts, given.max_bytes, given.seconds)
    try:
        return await start_preparer(model.path, model.loaded.tokenizer, fetcher, limits)
    except ConfigError as error:
        logger.warning("pictures are refused: %s", error)
        return None


def load_model(config: TokenizerConfig, path: Path) -> Model:
    """Reads the model's files; slow.

    Raises:
        ConfigError: They cannot be used, or a setting would have no effect.
    """
    name = config.served_model_name or tokenizer_name(config.model)
    loaded = load_tokenizer(path, config.chat_template)
    if loaded.only_encodes:
        refuse_idle(config, OF_ENCODERS)
    vocabulary = vocabulary_of(loaded)
    parsers = parser_defaults(config.tool_parser, config.reasoning_parser, loaded.chat_template)
    model = Model(name, loaded, vocabulary, parsers, build_grammars(path, loaded, config), path)
    gc.freeze()  # collections then skip what is loaded, and forked processes do not copy it
    return model


def run(config: TokenizerConfig) -> int:
    """Runs the service until a signal stops it.

    Returns:
        The exit code: 0 after a signal, 1 if it could not start.
    """
    started = time.monotonic()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        path = resolve_tokenizer(config.model, config.revision)
        if config.processes == 1:

            async def load() -> Model:
                return await asyncio.to_thread(load_model, config, path)

            return uvloop.run(
                serve(config, load, lambda port, model: announce_model(config.host, port, model, started))
            )
        return _run_group(config, load_model(config, path), started)
    except ConfigError as error:
        logger.error("%s", error)
        return 1


def _run_group(config: TokenizerConfig, model: Model, started: float) -> int:
    with reserve_port(config.host, config.port) as reserved:
        port = reserved.getsockname()[1]
        metrics = metrics_port(config.metrics_port, USUAL_METRICS_PORT, config.port)

        async def loaded() -> Model:
            return model

        def serve_one(number: int, on_serving: Callable[[], None]) -> int:
            setup_logging(f"tokenizer {number}", config.log_level, config.log_format)
            changes = {"port": port, "metrics_port": metrics + number if metrics else 0}
            try:
                return uvloop.run(
                    serve(config.model_copy(update=changes), loaded, lambda *_: on_serving(), reuse_port=True)
                )
            except ConfigError as error:
                logger.error("%s", error)
                return 1

        group = ProcessGroup(config.processes, serve_one, lambda: announce_model(config.host, port, model, started))
        return group.run()


def announce_model(host: str, port: int, model: Model, started: float) -> None:
    """Says where the service listens; ``started`` on the monotonic clock."""
    announce(
        logger,
        "listening on %s:%d with %s: %d tokens, loaded in %.1f s",
        host,
        port,
        model.name,
        model.loaded.vocab_size,
        time.monotonic() - started,
    )


async def serve(
    config: TokenizerConfig,
    load: Callable[[], Awaitable[Model]],
    on_serving: Callable[[int, Model], None],
    *,
    reuse_port: bool = False,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. Listens at once: while it loads, its health is NOT_SERVING and every
    call is refused as UNAVAILABLE.

    Args:
        config: The configuration.
        load: Reads the model's files.
        on_serving: Called with the port and the model once calls are taken.
        reuse_port: Whether other processes listen on the same port.

    Raises:
        ConfigError: It cannot start.
    """
    metrics = MetricSet()
    tracing = start_tracing("sapwood-tokenizer", config.trace_endpoint.address, config.trace_endpoint.ratio)
    telemetry = RpcTelemetry(metrics, tracing)
    server = ServiceServer(
        config.host,
        config.port,
        [SERVICE],
        uncounted=frozenset({DETOKENIZE}),
        telemetry=telemetry,
        tls=server_tls(config.tls_cert, config.tls_key, config.tls_client_ca),
        reuse_port=reuse_port,
        health_address=config.health_address,
        implementation=config.grpc_server,
    )
    starting = StartingService()
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(
        cast(tokenizer_pb2_grpc.TokenizerServicer, starting), server.grpc
    )
    port = await server.start()
    try:
        model = await load()
        library = None
        if not is_bounded(model.loaded.tokenizer):
            library = await start_library(model.loaded.tokenizer, model.loaded.origin)
        encoder = await asyncio.to_thread(build_encoder, model.loaded, config, library)
        renderer = await start_renderer(model.loaded, config.template_timeout)
        preparer = None if renderer is None else await build_preparer(config, model)
    except BaseException:
        await server.stop(0)
        raise
    limits = Limits(config.max_text_bytes.bytes, config.max_open_streams)
    starting.service = service = TokenizerService(
        model.loaded,
        model.vocabulary,
        model.name,
        model.parsers,
        encoder,
        renderer,
        read_pair_template(model.loaded.tokenizer) if library is None else library.pair,
        preparer,
        limits,
        server.draining,
        model.grammars,
        telemetry,
    )
    add_metrics(
        metrics,
        lambda: {"exact": encoder.exact_cache, "prefix": encoder.prefix_cache},
        lambda: service.open_streams,
        lambda: encoder.encoded,
        lambda: {} if preparer is None else preparer.counts,
        lambda: {} if preparer is None else preparer.seconds,
    )
    exposed = MetricsServer(
        metrics.registry, config.host, metrics_port(config.metrics_port, USUAL_METRICS_PORT, config.port)
    )
    await server.set_serving(True)
    on_serving(port, model)
    logger.info("metrics at http://%s:%d/metrics", config.host, exposed.port)
    await serve_until_stopped(server, drain_timeout=config.drain_timeout, drained=service.drained)
    service.close()
    await model.grammars.close()
    if renderer is not None:
        await renderer.close()
    if preparer is not None:
        await preparer.close()
    if library is not None:
        await library.close()
    await asyncio.to_thread(tracing.close)
    await asyncio.to_thread(exposed.close)
    return 0


# The service's methods while the model's files are read: a router that hears from it keeps requests waiting.
class StartingService:
    """A servicer that passes calls on to the service once there is one; until then they raise UnavailableError.

    Attributes:
        service: What answers. To be set once.
    """

    def __init__(self) -> None:
        self.service: tokenizer_pb2_grpc.TokenizerServicer | None = None

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        def call(request: Any, context: Any) -> Any:
            if self.service is None:
                raise UnavailableError("the tokenizer is starting", retry_after=1.0)
            return getattr(self.service, method)(request, context)

        return call
