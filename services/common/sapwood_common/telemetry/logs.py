"""Logs: one line an event, as text or JSON, with the ids of the request and the trace being served."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import numbers
import re
import sys
from typing import Literal

from sapwood_common.random_bytes import random_bytes
from sapwood_common.telemetry.shown_text import LongText, cut, shown

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


_MOST_SHOWN, _MOST_OF_VALUE, _MOST_OF_LONG = 16384, 1024, 12288
"""Characters of a line, of a value in it, and of a :class:`LongText` in it."""
_MOST_OF_TRACEBACK = 32768


def _message(record: logging.LogRecord) -> str:
    """A record's message on one line, its values and itself cut where they are long."""
    arguments = record.args
    if isinstance(arguments, tuple):
        arguments = tuple(map(_value, arguments))
    text = str(record.msg)
    return shown(text % arguments if arguments else text, _MOST_SHOWN)


def _value(value: object) -> object:
    """A value of a log line, cut where it is long."""
    if value is None or isinstance(value, numbers.Number):
        return value
    if isinstance(value, str):
        return cut(value, _MOST_OF_LONG if isinstance(value, LongText) else _MOST_OF_VALUE)
    return _Cut(value)


class _Cut:
    """A value of any class; a log line shows the beginning and the end of its text."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return cut(str(self._value), _MOST_OF_VALUE)

    def __repr__(self) -> str:
        return cut(repr(self._value), _MOST_OF_VALUE)


class _TextFormatter(logging.Formatter):
    """One line for people; an exception's lines follow, each begun with a bar."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the lines of its exception."""
        record.message, record.asctime = _message(record), self.formatTime(record, self.datefmt)
        text = self.formatMessage(record)
        for more in (record.exc_info and self.formatException(record.exc_info), record.stack_info):
            if more:
                text += "".join(f"\n    | {line}" for line in _lines(more))
        return text


def _lines(traceback: str) -> list[str]:
    """The lines of a traceback, without those in the middle where it is long: it may quote what clients sent."""
    half = _MOST_OF_TRACEBACK // 2
    if len(traceback) > 2 * half:
        traceback = f"{traceback[:half]}\n...\n{traceback[-half:]}"
    return [shown(line, _MOST_OF_VALUE) for line in traceback.split("\n")]


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
            "message": _message(record),
        }
        if (request_id := request_id_var.get()) != "-":
            entry["request_id"] = request_id
        if (trace_id := trace_id_of(traceparent_var.get())) is not None:
            entry["trace_id"] = trace_id
        if record.exc_info is not None:
            entry["exception"] = "\n".join(_lines(self.formatException(record.exc_info)))
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
    text = _TextFormatter(
        f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} [%(request_id)s] %(message)s", datefmt="%H:%M:%S"
    )
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "urllib3", "httpx"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
