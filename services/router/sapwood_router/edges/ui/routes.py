"""What /ui adds to the HTTP port."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sapwood_router.edges.guard import Guard
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http.origins import Origins
from sapwood_router.edges.openai.chat import contexts_of
from sapwood_router.edges.openai.other_parameters import CHAT_NEUTRAL
from sapwood_router.edges.openai.parameters import BESIDE
from sapwood_router.edges.openai.types import ChatRequest
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.edges.ui.files import BARE, FOLDER, Files, lead_to_folder
from sapwood_router.edges.ui.fleet import FleetPage
from sapwood_router.edges.ui.observed import Observed, ObservedPages
from sapwood_router.flow.explain import explain
from sapwood_router.flow.generation import Pipeline
from sapwood_router.observe.status import RouterState


def ui_routes(
    pipeline: Pipeline,
    guard: Guard,
    origins: Origins,
    status: Callable[[], RouterState] | None,
    observed: Observed,
) -> list[Route]:
    """The routes.

    Args:
        pipeline: Knows the models.
        guard: Asks for keys, if the router does.
        origins: Under which names the page may be.
        status: How the router and its workers are; None: that, and how requests are routed, is for operators.
        observed: What the page shows of the last hour, the cache and the latest requests, where it shows workers.
    """
    routes: list[Route] = [
        Ask("/", lead_to_folder, public=True),
        Ask(BARE, lead_to_folder, public=True),
        Ask(FOLDER, Files().show, public=True, is_folder=True),
        Ask("/ui/fleet", FleetPage(pipeline, guard, origins, status).show, public=True),
    ]
    if status is not None:
        pages = ObservedPages(observed, guard, origins)
        routes += [
            Post("/ui/route", explain_route),
            Ask("/ui/history", pages.show_history, public=True),
            Ask("/ui/traces", pages.show_traces, public=True),
            Ask("/ui/cache", pages.show_cache, public=True),
        ]
    return routes


# ``POST /ui/route``: where a chat request would go now, and why. Nothing is generated.
_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


async def explain_route(exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
    """Explains a route as ``ExplainRoute`` does, for a body that ``/v1/chat/completions`` takes.

    Only what workers cached for the caller's own tenant counts.

    Raises:
        SapwoodError: The request is wrong, its prompt cannot be tokenized, or no worker can be chosen.
    """
    given = decode_object(body)
    request = convert(given, ChatRequest, CHAT_NEUTRAL, BESIDE, left_out=exchange.left_out)
    exchange.accept_body_id(request)
    asked = (await exchange.in_turns(contexts_of(request, given, exchange.request_id, deadline, exchange.left_out)))[0]
    asked.caller = exchange.caller(request, given)
    exchange.on_disconnect(lambda: None)
    await pipeline.prepare(asked)
    explanation = explain(asked, pipeline.registry, pipeline.policies, pipeline.disaggregation)
    await exchange.send_body(200, msgspec.json.encode(explanation), _HEADERS)
