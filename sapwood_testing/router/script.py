"""How a fake worker answers, and what it saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.errors import SapwoodError


def echo(prompt: Sequence[int]) -> list[int]:
    """The default script: the prompt again, without what comes before its first letter (a BOS)."""
    return [token for token in prompt if token >= 3]


@dataclass(slots=True)
class Script:
    """How a worker answers; tests change it while the worker runs.

    Attributes:
        tokens: The tokens to generate for a prompt.
        reason: Why the generation ends; LENGTH too when max_tokens cuts it short.
        ends_with_token: Whether an end token follows where the reason is STOP; else its grammar ends the generation.
        chunk: Tokens a message.
        delay: Seconds before each message.
        fail_after: Messages after which ``error`` is raised; None never.
        error: What is raised then.
        gate: While it is clear, no message but the first ``gate_after`` is sent.
        gate_after: See ``gate``.
        fading: How much less the log probability of each token of the answer is than that of the same token in the place before.
    """

    tokens: Callable[[Sequence[int]], list[int]] = echo
    reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_STOP
    ends_with_token: bool = True
    chunk: int = 1
    delay: float = 0.0
    fail_after: int | None = None
    error: SapwoodError | None = None
    gate: asyncio.Event | None = None
    gate_after: int = 0
    fading: float = 0.0


@dataclass(slots=True)
class SeenCall:
    """A Generate call as the worker saw it; ``outcome`` is running, finished, failed or cancelled."""

    request: worker_pb2.WorkerGenerateRequest
    request_id: str
    time_remaining: float | None
    outcome: str = "running"
    sent_tokens: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class SeenEmbedding:
    """An embedding request as the worker saw it; ``over`` is set when it was answered, or cancelled."""

    request: worker_pb2.WorkerEmbedRequest
    time_remaining: float | None
    over: asyncio.Event = field(default_factory=asyncio.Event)
