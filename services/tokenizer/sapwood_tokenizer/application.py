"""The whole tokenizer service: loads, listens, drains."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from sapwood.v1 import tokenizer_pb2_grpc
from sapwood_common.errors import ConfigError
from sapwood_common.metrics import MetricSet, MetricsServer, metrics_port
from sapwood_common.rpc_telemetry import RpcTelemetry
from sapwood_common.server import ServiceServer, serve_until_stopped
from sapwood_common.telemetry import announce
from sapwood_common.tls import server_tls
from sapwood_common.tracing import start_tracing
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_tokenizer.encoder import Encoder, EncoderOptions
from sapwood_tokenizer.grammar import build_grammars
from sapwood_tokenizer.loader import LoadedTokenizer, load_tokenizer, resolve_tokenizer, tokenizer_name
from sapwood_tokenizer.parser_defaults import parser_defaults
from sapwood_tokenizer.service import DETOKENIZE, SERVICE, Limits, TokenizerService
from sapwood_tokenizer.tokenizer_metrics import add_metrics

logger = logging.getLogger(__name__)

USUAL_METRICS_PORT = 9152

_MOST_THREADS = 8
"""Encoding threads unless told otherwise; more than the event loop can feed are of no use."""


def build_encoder(loaded: LoadedTokenizer, config: TokenizerConfig) -> Encoder:
    """The encoder as configured.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """
    # The encoder spreads texts over its own threads; the library's would only get in the way. It asks at each call.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Encoder(
        loaded.tokenizer,
        EncoderOptions(
            max_text_bytes=config.max_text_bytes,
            max_text_tokens=config.max_text_tokens,
            threads=config.encode_threads or min(_MOST_THREADS, os.cpu_count() or 1),
            exact_cache_bytes=int(config.exact_cache_mb * 2**20),
            prefix_cache_bytes=int(config.prefix_cache_mb * 2**20),
        ),
    )


async def serve(config: TokenizerConfig) -> int:
    """Runs the service until it is told to stop.

    Returns:
        The exit code: 0 after a signal, 1 if it could not start.
    """
    started = time.monotonic()
    try:
        name = config.served_model_name or tokenizer_name(config.model)
        path = resolve_tokenizer(config.model)
        loaded = await asyncio.to_thread(load_tokenizer, path, config.chat_template)
        parsers = parser_defaults(config.tool_parser, config.reasoning_parser, loaded.chat_template)
        grammars = await asyncio.to_thread(build_grammars, path, loaded, config)
        metrics = MetricSet()
        tracing = start_tracing("sapwood-tokenizer", config.trace_endpoint, config.trace_ratio)
        server = ServiceServer(
            config.host,
            config.port,
            [SERVICE],
            uncounted=frozenset({DETOKENIZE}),
            telemetry=RpcTelemetry(metrics, tracing),
            tls=server_tls(config.tls_cert, config.tls_key, config.tls_client_ca),
        )
        limits = Limits(config.max_text_bytes, config.max_open_streams, config.template_timeout)
        encoder = build_encoder(loaded, config)
        service = TokenizerService(loaded, name, parsers, encoder, limits, server.draining, grammars)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(service, server.grpc)
        add_metrics(
            metrics,
            lambda: {"exact": encoder.exact_cache, "prefix": encoder.prefix_cache},
            lambda: service.open_streams,
        )
        exposed = MetricsServer(
            metrics.registry, config.host, metrics_port(config.metrics_port, USUAL_METRICS_PORT, config.port)
        )
        port = await server.start()
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    await server.set_serving(True)
    announce(
        logger,
        "listening on %s:%d with %s: %d tokens, loaded in %.1f s",
        config.host,
        port,
        name,
        loaded.vocab_size,
        time.monotonic() - started,
    )
    logger.info("metrics at http://%s:%d/metrics", config.host, exposed.port)
    await serve_until_stopped(server, drain_timeout=config.drain_timeout, drained=service.drained)
    service.close()
    await grammars.close()
    await asyncio.to_thread(tracing.close)
    await asyncio.to_thread(exposed.close)
    return 0
