"""``/v1/conversations``: conversations and their items, which requests for responses read and add to."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_net.pacing.steps import in_turns
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http.listing import listing, no_item, page_body, page_query
from sapwood_router.edges.http.metadata import checked_metadata
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.responses.items import Conversation, input_items
from sapwood_router.edges.responses.store import ConversationStore
from sapwood_router.edges.responses.types import Item
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.flow.generation import Pipeline

PATH = "/v1/conversations"
_BELOW = f"{PATH}/"
_ITEMS = "items"
_MOST_ADDED = 20
"""Items that a request may add, as with OpenAI."""


class ConversationRequest(msgspec.Struct):
    """``POST /v1/conversations``, and that of a conversation, which takes ``metadata`` only."""

    items: list[Item] | None = None
    metadata: dict[str, str] | None = None


class ItemsRequest(msgspec.Struct):
    """``POST /v1/conversations/ID/items``."""

    items: list[Item]


class ConversationObject(msgspec.Struct):
    """A conversation."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


class ConversationsApi:
    """The paths.

    Args:
        store: Has the conversations.
    """

    def __init__(self, store: ConversationStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Post(
                PATH,
                self.create,
                summary="Begins a conversation",
                takes=(ConversationRequest,),
                gives=ConversationObject,
            ),
            Post(_BELOW, self.change, summary="ID: sets its metadata; ID/items: adds items to it"),
            Ask(_BELOW, self.show, summary="ID, ID/items, ID/items/ITEM: shows a conversation or what is in it"),
            Ask(_BELOW, self.delete, method="DELETE", summary="ID, ID/items/ITEM: forgets a conversation or an item"),
        ]

    async def create(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Begins a conversation.

        Raises:
            SapwoodError: The request is wrong.
        """
        given = decode_object(body or b"{}")
        request = convert(given, ConversationRequest, {}, left_out=exchange.left_out)
        items = await _checked(exchange, given.get("items") or [], request.items or [])
        made = ConversationObject(f"conv_{secrets.token_hex(16)}", int(time.time()), checked_metadata(request.metadata))
        encoded = msgspec.json.encode(made)
        await self._store.create(exchange.tenant, made.id, encoded, items)
        await exchange.send_body(200, encoded)

    async def change(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Sets the metadata of a conversation, or adds items to it.

        Raises:
            NotFoundError: There is no such conversation.
            SapwoodError: The request is wrong.
        """
        conversation_id, below, item_id = _names_in(exchange.path)
        if item_id:
            raise HttpError(404, f"{exchange.path} takes no POST")
        await self._store.get(exchange.tenant, conversation_id)
        given = decode_object(body)
        if below:
            request = convert(given, ItemsRequest, {}, left_out=exchange.left_out)
            items = await _checked(exchange, given["items"], request.items)
            if not await self._store.add(exchange.tenant, conversation_id, items):
                await self._store.get(exchange.tenant, conversation_id)  # it was forgotten meanwhile
            await exchange.send_body(200, listing(items, {"order": "asc", "limit": "100"}))
            return
        changed = convert(given, ConversationRequest, {"items": ([],)}, left_out=exchange.left_out)
        metadata = checked_metadata(changed.metadata)

        def with_metadata(known: bytes) -> bytes:
            found = msgspec.json.decode(known, type=ConversationObject)
            found.metadata = metadata
            return msgspec.json.encode(found)

        await exchange.send_body(200, await self._store.change(exchange.tenant, conversation_id, with_metadata))

    async def show(self, exchange: Exchange) -> None:
        """Shows a conversation, its items, or one of them.

        Raises:
            NotFoundError: There is none.
        """
        conversation_id, below, item_id = _names_in(exchange.path)
        found = await self._store.get(exchange.tenant, conversation_id)
        if item_id:
            found = await self._store.item(exchange.tenant, conversation_id, item_id)
        elif below:
            found = await self._page(exchange, conversation_id)
        await exchange.send_body(200, found)

    async def _page(self, exchange: Exchange, conversation_id: str) -> bytes:
        asked = page_query(exchange.query)
        found = await self._store.page(
            exchange.tenant, conversation_id, asked.limit, newest_first=asked.newest_first, after=asked.after
        )
        if found is None:
            raise no_item(asked.after or "")
        return page_body(found[0], more=found[1])

    async def delete(self, exchange: Exchange) -> None:
        """Forgets a conversation with its items, or one item.

        Raises:
            NotFoundError: There is none.
        """
        conversation_id, below, item_id = _names_in(exchange.path)
        if below and not item_id:
            raise HttpError(404, f"{exchange.path} takes no DELETE; one of its items does")
        if item_id:
            found = await self._store.get(exchange.tenant, conversation_id)
            await self._store.delete_item(exchange.tenant, conversation_id, item_id)
        else:
            await self._store.delete(exchange.tenant, conversation_id)
            body = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            found = msgspec.json.encode(body)
        await exchange.send_body(200, found)


def _names_in(path: str) -> tuple[str, str, str]:
    """The id of a conversation, ``items`` or "", and the id of an item or "". Raises HttpError for other paths."""
    conversation_id, _, below = path.removeprefix(_BELOW).partition("/")
    kind, _, item_id = below.partition("/")
    if not conversation_id or kind not in ("", _ITEMS) or "/" in item_id:
        raise HttpError(404, f"there is no {path}")
    return conversation_id, kind, item_id


async def _checked(exchange: Exchange, given: Any, items: list[Item]) -> list[dict[str, Any]]:
    """Items to be added, with new ids.

    Raises:
        InvalidArgumentError: There are too many, or one is not understood.
    """
    if len(items) > _MOST_ADDED:
        raise InvalidArgumentError(f"items may be at most {_MOST_ADDED}, got {len(items)}", field="items")
    for index, item in enumerate(items):
        if item.type == "item_reference":
            raise InvalidArgumentError("an item must be given itself here", field=f"items[{index}].type")
    await in_turns(Conversation().take(items, {}, exchange.left_out, "items"), None)
    return input_items([{**item, "id": None} for item in given], secrets.token_hex(16))
