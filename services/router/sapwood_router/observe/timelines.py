"""The timelines of the latest requests: which service had a request when, for the page's Trace view. A ring of MOST_REQUESTS."""

from __future__ import annotations

import time
from collections import deque

import msgspec

MOST_REQUESTS = 100
MOST_STAGES = 64
"""Of one request: an attempt has six."""
SERVICES = {"prepare": "tokenizer", "execute": "worker", "prefill": "worker", "transfer": "worker", "decode": "worker"}
"""Where a stage's time is spent; elsewhere it is the router."""


class StageView(msgspec.Struct):
    """A stage; ``start`` and ``seconds`` in seconds, the first since the request came. ``service`` with the worker's address."""

    name: str
    service: str
    worker: str
    start: float
    seconds: float


class Timeline(msgspec.Struct):
    """A request that ended; ``at`` is when it came, in Unix seconds. Holds nothing of what was said."""

    request_id: str
    trace: str
    model: str
    worker: str
    reason: str
    status: str
    at: float
    seconds: float
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    resumptions: int
    stages: list[StageView]
    tenant: str = ""


class Noted:
    """The stages of one request while it runs."""

    __slots__ = ("_began", "stages")

    def __init__(self, began: float) -> None:
        self._began = began
        self.stages: list[StageView] = []

    def add(self, name: str, worker: str, started: float, seconds: float) -> None:
        """A stage is over; ``started`` on ``time.perf_counter``'s clock."""
        if len(self.stages) < MOST_STAGES:
            service = SERVICES.get(name, "router")
            at = worker if service == "worker" else ""
            self.stages.append(StageView(name, service, at, max(0.0, started - self._began), seconds))


class Timelines:
    """Keeps them."""

    def __init__(self) -> None:
        self._ring: deque[Timeline] = deque(maxlen=MOST_REQUESTS)

    def add(self, timeline: Timeline) -> None:
        """A request ended."""
        self._ring.append(timeline)

    def latest(self, tenant: str | None) -> list[Timeline]:
        """Those of a tenant, the latest first; None: all. The tenant's name is left out."""
        return [
            msgspec.structs.replace(each, tenant="")
            for each in reversed(self._ring)
            if tenant is None or each.tenant == tenant
        ]


def came_at(started: float) -> float:
    """The Unix time of a moment on ``time.perf_counter``'s clock."""
    return time.time() - (time.perf_counter() - started)
