"""Responses that are kept for clients that ask for them again or continue them, and conversations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.request.context import Turn
from sapwood_router.store.records import MOST_AT_ONCE, Record, Retention, Store

MOST_TURNS = 32_768
"""The most turns of a conversation, including earlier responses: no tokenizer takes more fields, and the router checks all turns
without a pause."""
_READ_AT_ONCE = 1000


class StoredResponse(msgspec.Struct, frozen=True):
    """A response.

    Attributes:
        response_id: Its id.
        body: The response as JSON.
        turns: The questions and answers of this response, without those that it continues.
        previous: The id of the response that it continues.
        items: What was asked, as a list of items in JSON.
        done: Whether it is the whole answer.
        in_background: Whether its client did not wait for it.
    """

    response_id: str
    body: bytes
    turns: tuple[Turn, ...]
    previous: str | None
    items: bytes = b"[]"
    done: bool = True
    in_background: bool = False


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StoredResponse)


class ResponseStore:
    """Keeps responses, each for the tenant who asked for it.

    Args:
        store: Where.
        retention: How many, and how much of them.
    """

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention

    @property
    def keeps(self) -> bool:
        """Whether it keeps any."""
        return self._retention.most > 0

    async def put(self, tenant: str, response: StoredResponse, items: Sequence[Record] = ()) -> None:
        """Keeps a response, in the place of others where there is no room, and adds items to its conversation, if there still
        is one.

        A response that is larger than all the room there is is not kept.
        """
        body = _ENCODER.encode(response)
        record = Record("response", tenant, response.response_id, body, parent=response.previous or "")
        if self.keeps and record.size <= self._retention.most_bytes:
            await self._store.put([record, *items])
        elif items:
            await self._store.put(items)

    async def get(self, tenant: str, response_id: str, field: str | None = None) -> StoredResponse:
        """A response.

        Raises:
            NotFoundError: It is not kept, or not for this tenant.
        """
        found = await self._store.get("response", tenant, response_id)
        if found is None:
            raise _lost(response_id, field)
        return _DECODER.decode(found.body)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response.

        Raises:
            NotFoundError: As :meth:`get`.
        """
        if not await self._store.delete("response", tenant, response_id):
            raise _lost(response_id, None)

    async def history(self, tenant: str, response_id: str, field: str) -> tuple[Turn, ...]:
        """The conversation up to a response and with it; all of it counts as used.

        Raises:
            NotFoundError: The response, or one that it continues, is not kept; the error names ``field``.
            InvalidArgumentError: The conversation has more turns or bytes than are looked at in one piece.
        """
        records = await self._store.chain("response", tenant, response_id, MOST_TURNS)
        if not records:
            raise _lost(response_id, field)
        _check_bytes(records, field)
        chain = [_DECODER.decode(record.body) for record in records]
        for response in chain:
            if not response.done:
                raise InvalidArgumentError(f"response {response.response_id!r} is still in progress", field=field)
        if sum(len(response.turns) for response in chain) > MOST_TURNS:
            raise InvalidArgumentError(f"the conversation has more than {MOST_TURNS} turns", field=field)
        if chain[-1].previous:
            raise _lost(chain[-1].previous, field)
        return tuple(turn for response in reversed(chain) for turn in response.turns)


class ConversationStore:
    """Keeps conversations and their items, each for its tenant.

    Args:
        store: Where.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._latest = 0

    async def create(
        self, tenant: str, conversation_id: str, body: bytes, items: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Keeps a new conversation, and its first items."""
        record = Record("conversation", tenant, conversation_id, body)
        await self._store.put([record, *self.records(tenant, conversation_id, items)])

    async def get(self, tenant: str, conversation_id: str, field: str | None = None) -> bytes:
        """A conversation, which then counts as used.

        Raises:
            NotFoundError: It is not kept, or not for this tenant.
        """
        found = await self._store.chain("conversation", tenant, conversation_id, 1)
        if not found:
            raise _no_conversation(conversation_id, field)
        return found[0].body

    async def change(self, tenant: str, conversation_id: str, change: Callable[[bytes], bytes]) -> bytes:
        """Changes a conversation as it is at this moment; returns what it is now.

        Raises:
            NotFoundError: As :meth:`get`.
        """
        while True:
            found = await self._store.get("conversation", tenant, conversation_id)
            if found is None:
                raise _no_conversation(conversation_id)
            changed = change(found.body)
            if await self._store.swap(msgspec.structs.replace(found, body=changed)):
                return changed

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Forgets a conversation and its items.

        Raises:
            NotFoundError: As :meth:`get`.
        """
        await self.get(tenant, conversation_id)
        await self._store.delete("conversation", tenant, conversation_id)

    async def add(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> bool:
        """Adds items at the end of a conversation; returns whether there is one."""
        return await self._store.put(self.records(tenant, conversation_id, items))

    def records(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]) -> list[Record]:
        """Items as records, to be put at the end of a conversation."""
        made = []
        for item in items:
            self._latest = max(self._latest + 1, int(time.time() * 1e6))
            body = msgspec.json.encode(item)
            key = _item_key(conversation_id, item["id"])
            made.append(Record("item", tenant, key, body, parent=conversation_id, position=self._latest))
        return made

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> bytes:
        """An item.

        Raises:
            NotFoundError: There is none.
        """
        found = await self._store.get("item", tenant, _item_key(conversation_id, item_id))
        if found is None:
            raise NotFoundError(f"there is no item {item_id[:100]!r} in this conversation")
        return found.body

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> None:
        """Forgets an item.

        Raises:
            NotFoundError: There is none.
        """
        await self.item(tenant, conversation_id, item_id)
        await self._store.delete("item", tenant, _item_key(conversation_id, item_id))

    async def page(
        self, tenant: str, conversation_id: str, limit: int, *, newest_first: bool, after: str | None
    ) -> tuple[list[dict[str, Any]], bool] | None:
        """Some items, and whether more follow; fewer where they are large. None: there is none that is called ``after``.

        Args:
            tenant: Whose.
            conversation_id: Of which conversation.
            limit: Most of them.
            newest_first: The order.
            after: The id of the item before them; None: they are the first.
        """
        place: tuple[int, str] | None = None
        if after is not None:
            record = await self._store.get("item", tenant, _item_key(conversation_id, after))
            if record is None:
                return None
            place = record.position, record.key
        found = await self._store.below(
            "item", tenant, conversation_id, after=place, limit=limit + 1, newest_first=newest_first
        )
        is_cut = sum(len(each.body) for each in found) >= MOST_AT_ONCE
        return [msgspec.json.decode(each.body) for each in found[:limit]], is_cut or len(found) > limit

    async def items(self, tenant: str, conversation_id: str) -> list[dict[str, Any]]:
        """All items in order.

        Raises:
            InvalidArgumentError: They are more than are looked at in one piece.
        """
        found: list[Record] = []
        after: tuple[int, str] | None = None
        while True:
            page = await self._store.below("item", tenant, conversation_id, after=after, limit=_READ_AT_ONCE)
            found += page
            if len(found) > MOST_TURNS:
                raise InvalidArgumentError(f"the conversation has more than {MOST_TURNS} items", field="conversation")
            _check_bytes(found, "conversation")
            if not page:
                return [msgspec.json.decode(record.body) for record in found]
            after = page[-1].position, page[-1].key


def _no_conversation(conversation_id: str, field: str | None = None) -> NotFoundError:
    return NotFoundError(f"there is no conversation {conversation_id[:100]!r} here, or no longer", field=field)


def _item_key(conversation_id: str, item_id: str) -> str:
    return f"{conversation_id}/{item_id}"


def _check_bytes(records: Sequence[Record], field: str) -> None:
    if sum(len(each.body) for each in records) >= MOST_AT_ONCE:
        raise InvalidArgumentError(f"the conversation has more than {MOST_AT_ONCE} bytes", field=field)


def _lost(response_id: str, field: str | None) -> NotFoundError:
    return NotFoundError(f"there is no response {response_id[:100]!r} here, or no longer", field=field)
