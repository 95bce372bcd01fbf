"""The whole tokenizer service: loads, listens, drains."""

from __future__ import annotations

import asyncio
import logging
import time

from sapwood.v1 import tokenizer_pb2_grpc
from sapwood_common.errors import ConfigError
from sapwood_common.model_files import model_name, resolve_model
from sapwood_common.server import ServiceServer, serve_until_stopped
from sapwood_common.telemetry import announce
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_tokenizer.loader import load_tokenizer
from sapwood_tokenizer.parser_defaults import parser_defaults
from sapwood_tokenizer.service import DETOKENIZE, SERVICE, Limits, TokenizerService

logger = logging.getLogger(__name__)


async def serve(config: TokenizerConfig) -> int:
    """Runs the service until it is told to stop.

    Returns:
        The exit code: 0 after a signal, 1 if it could not start.
    """
    started = time.monotonic()
    try:
        name = config.served_model_name or model_name(config.model)
        loaded = await asyncio.to_thread(load_tokenizer, resolve_model(config.model), config.chat_template)
        parsers = parser_defaults(config.tool_parser, config.reasoning_parser, loaded.chat_template)
        server = ServiceServer(config.host, config.port, [SERVICE], uncounted=frozenset({DETOKENIZE}))
        limits = Limits(config.max_text_bytes, config.max_open_streams, config.template_timeout)
        service = TokenizerService(loaded, name, parsers, limits, server.draining)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(service, server.grpc)
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
    await serve_until_stopped(server, drain_timeout=config.drain_timeout, drained=service.drained)
    service.close()
    return 0
