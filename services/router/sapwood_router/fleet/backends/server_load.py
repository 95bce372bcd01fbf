"""How busy a model server is, by the metrics that the model server protocol of the Gateway API inference extension asks for."""

from __future__ import annotations

import math
import re

from sapwood_router.routing.worker_view import Load

_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
_USED = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
_SAMPLE = re.compile(
    rb"^(%b)(?:\{[^\n]*\})?[ \t]+([0-9.eE+-]+)" % b"|".join((*_RUNNING, *_WAITING, *_USED)), re.MULTILINE
)
_MOST = 1_000_000
"""Requests that a server can have: a larger number is none."""
_PARTS = 10_000
"""Pages that stand for all of a server's cache, whose size it does not tell."""


def load_of(page: bytes) -> Load | None:
    """The load that a page of metrics in Prometheus' format tells; None: it tells none.

    A server with several engines has a line for each: their requests are added, and the fullest cache counts.
    """
    found: dict[bytes, list[float]] = {}
    for name, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            found.setdefault(name, []).append(value)
    running, waiting, used = (
        next((found[name] for name in names if name in found), []) for names in (_RUNNING, _WAITING, _USED)
    )
    if not (running or waiting or used):
        return None
    return Load(
        running_requests=min(_MOST, int(sum(running))),
        waiting_requests=min(_MOST, int(sum(waiting))),
        used_pages=round(_PARTS * min(1.0, max(used, default=0.0))),
        num_pages=_PARTS,
    )
