"""/status: the router and its workers as a page that needs no script and nothing from elsewhere, and renews itself."""

from __future__ import annotations

import asyncio
import time
from html import escape

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from sapwood_router.edges.worker_names import WorkerNames
from sapwood_router.observe.status import RouterState, WorkerState

HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sapwood router</title>
<meta http-equiv="refresh" content="2"><meta name="viewport" content="width=device-width">
<style>
body{{font:14px system-ui,sans-serif;margin:2em;color-scheme:light dark}}
table{{border-collapse:collapse}} th,td{{padding:.3em .9em;text-align:right;border-bottom:1px solid #8884}}
th:first-child,td:first-child,.text{{text-align:left}} .bad{{color:#d33;font-weight:600}}
</style></head><body>
<h1>Sapwood router</h1>
<p>{problem}up {uptime} &middot; policy {policy} &middot; {running} running &middot; {queued} queued &middot;
{rate:.0f} tokens/s &middot; {resumptions} streams resumed</p>
<table><thead><tr><th>worker</th><th class="text">state</th><th class="text">model</th><th>here</th><th>running</th>
<th>waiting</th><th>pages</th><th>hit rate</th><th>tokens/s</th><th class="text">breaker</th></tr></thead>
<tbody>
{rows}
</tbody></table>
</body></html>
"""


def render(state: RouterState, workers: WorkerNames) -> bytes:
    """The page of a snapshot."""
    problem = f'<span class="bad">{escape(state.problem)}</span> &middot; ' if state.problem else ""
    return _PAGE.format(
        problem=problem,
        uptime=_duration(state.uptime),
        policy=escape(state.policy),
        running=state.running,
        queued=state.queued,
        rate=state.tokens_per_second,
        resumptions=state.resumptions,
        rows="\n".join(_row(worker, workers.id_of(worker.address)) for worker in state.workers),
    ).encode()


def _row(worker: WorkerState, name: str) -> str:
    load = worker.load
    state = worker.state + (f": {worker.problem}" if worker.problem else "")
    return (
        f"<tr><td>{escape(worker.address)} <small>{name}</small></td>"
        f"{_text(state, worker.state == 'down')}{_text(worker.model or '-')}"
        f"<td>{worker.in_flight}</td><td>{load.running_requests}</td><td>{load.waiting_requests}</td>"
        f"<td>{_share(worker.used_share)}</td><td>{_share(worker.hit_rate)}</td><td>{worker.tokens_per_second:.0f}</td>"
        f"{_text(worker.breaker, worker.breaker != 'closed')}</tr>"
    )


def _text(text: str, bad: bool = False) -> str:
    return f'<td class="text{" bad" if bad else ""}">{escape(text)}</td>'


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds) % 60} s"


_REST = 9
"""The pause between two renderings of one content type, as a multiple of the time the last one took."""


class MetricsPage:
    """Renders a registry in a thread, each time for all who ask until it begins.

    Args:
        registry: What is shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._coming: dict[str, asyncio.Task[bytes]] = {}
        """Renderings that have not begun, by content type."""
        self._due: dict[str, float] = {}
        """When the next may begin, on the event loop's clock."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page as it is from now on, and its content type, which ``accept``, the request's header, chooses."""
        _, content_type = choose_encoder(accept)
        if content_type not in self._coming:
            self._coming[content_type] = asyncio.create_task(self._render(accept, content_type))
        return await asyncio.shield(self._coming[content_type]), content_type

    async def _render(self, accept: str, content_type: str) -> bytes:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due.get(content_type, 0.0) - loop.time())
        del self._coming[content_type]
        encode, _ = choose_encoder(accept)
        began = time.perf_counter()
        page: bytes = await asyncio.to_thread(encode, self._registry)
        self._due[content_type] = loop.time() + _REST * (time.perf_counter() - began)
        return page
