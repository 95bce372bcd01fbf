"""Logs: one line an event, as text or JSON, with the ids of the request and the trace being served."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import re
import sys
from typing import Literal

from sapwood_common.random_bytes import random_bytes

REQUEST_ID_KEY = "x-request-id"
"""Metadata key and HTTP header that carry the request id between services."""

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")
"""The id of the request that the current task serves, ``-`` outside of one."""

TRACEPARENT_KEY = "traceparent"
"""Metadata key and HTTP header of the W3C trace context."""

traceparent_var: contextvars.ContextVar[str | None] = contextvars.ContextVar("traceparent", default=None)
"""The W3C trace context that the current task works in, None outside of one."""

LogFormat = Literal["text", "json"]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def new_request_id() -> str:
    """A fresh request id."""
    return f"req-{random_bytes(16).hex()}"


def is_valid_request_id(value: str) -> bool:
    """Whether a client's request id is safe to put into metadata, headers and logs: 1 to 128 plain characters."""
    return _VALID_REQUEST_ID.fullmatch(value) is not None


def is_valid_traceparent(value: str) -> bool:
    """Whether a ``traceparent`` is well formed; one that is not is ignored, as W3C says."""
    return _TRACEPARENT.fullmatch(value) is not None


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace id in a ``traceparent``."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    return found[1] if found is not None else None


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := request_id_var.get()) != "-":
            entry["request_id"] = request_id
        if (trace_id := trace_id_of(traceparent_var.get())) is not None:
            entry["trace_id"] = trace_id
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id_var.get()
        return True


def announce(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Logs a line that shows whatever the level: where a service listens, for people and for programs that start it."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, arguments, None))


def setup_logging(service: str, level: str = "info", log_format: LogFormat = "text") -> None:
    """Sends the process's logs to standard error, each line with time, level, service and request id; in JSON with trace id.

    Args:
        service: The name that the lines carry.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``text`` for people, ``json`` for machines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestIdFilter())
    text = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} [%(request_id)s] %(message)s", datefmt="%H:%M:%S"
    )
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "urllib3", "httpx"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
