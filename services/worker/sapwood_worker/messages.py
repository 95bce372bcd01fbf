"""What the gRPC front and the scheduler process say to each other: msgpack over ZeroMQ.

A request goes by a serial number that the front gives it and never gives again: a client may use its request id anew the
moment its old request is cancelled, while outputs of that are still on their way.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sapwood_worker.cache.kv_events import KvEvent
from sapwood_worker.cache.report import TierReport
from sapwood_worker.model_info import ModelInfo
from sapwood_worker.sampling.params import SamplingParams
from sapwood_worker.scheduler.load import Load
from sapwood_worker.scheduler.output import RequestOutput
from sapwood_worker.step_clock import StepTime


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request.

    ``token_ids``: native uint32. ``grammar``: a compiled grammar, empty for none; ``output_tokens``: so many of
    ``token_ids``, at the end, are output of before.
    """

    serial: int
    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    grammar: bytes = b""
    output_tokens: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, if it has not ended; it gets no further output."""

    serial: int


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Empty the prefix cache; answered with Flushed of the same ``call``."""

    call: int


CacheVerb = Literal["stats", "clear", "attach", "detach"]


class CacheCommand(msgspec.Struct, frozen=True, tag="cache"):
    """Show or change the tiers of the KV cache; answered with CacheAnswer of the same ``call``.

    ``clear`` takes the name of a tier or ``all``, ``attach`` the URL of a store; the others take nothing.
    """

    call: int
    verb: CacheVerb
    argument: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit now."""


ToScheduler = Submit | Abort | Flush | CacheCommand | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The scheduler cannot start; it exits after this."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A submitted request was not let in.

    ``kind``: the name of its class in :mod:`sapwood_common.errors`; the scheduler process knows no gRPC status.
    """

    serial: int
    kind: str
    message: str
    field: str | None
    retry_after: float | None


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What came of one scheduler step.

    ``kv_events``: what the prefix cache stored and removed since the last; ``times``: how long this step, and those before it
    that had nothing to say, took.
    """

    outputs: list[RequestOutput]
    load: Load
    kv_events: list[KvEvent] = []
    times: list[StepTime] = []


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    """The answer to Flush."""

    call: int
    freed_pages: int


class CacheAnswer(msgspec.Struct, frozen=True, tag="cache"):
    """The answer to CacheCommand: the tiers as they are now, and what went wrong; empty: nothing."""

    call: int
    tiers: list[TierReport]
    error: str = ""


FromScheduler = Ready | Failed | Refused | Step | Flushed | CacheAnswer

to_scheduler_decoder = msgspec.msgpack.Decoder(ToScheduler)
from_scheduler_decoder = msgspec.msgpack.Decoder(FromScheduler)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToScheduler | FromScheduler) -> bytes:
    """The msgpack bytes of any of the messages above."""
    return _encoder.encode(message)
