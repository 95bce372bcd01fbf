"""``POST /ui/route``: where a chat request would go now, and why. Nothing is generated."""

from __future__ import annotations

import msgspec

from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.openai.chat import contexts_of
from sapwood_router.edges.openai.other_parameters import CHAT_NEUTRAL
from sapwood_router.edges.openai.parameters import BESIDE
from sapwood_router.edges.openai.types import ChatRequest
from sapwood_router.flow.explain import explain
from sapwood_router.flow.pipeline import Pipeline

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
