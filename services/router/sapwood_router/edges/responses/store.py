"""Keeps a limited number of responses in memory, for clients that ask for them again or continue them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.request.context import Turn

_OVERHEAD = 4096
"""Bytes that count for each response beside its texts."""
_MOST_TURNS = 32_768
"""The most turns of a conversation, including earlier responses: no tokenizer takes more fields, and the router checks all turns
without a pause."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response.

    Attributes:
        response_id: Its id.
        body: The response as JSON.
        turns: The questions and answers of this response, without those that it continues.
        previous: The id of the response that it continues.
        input_bytes: How long the request was.
        items: What was asked, as a list of items in JSON.
        done: Whether it is the whole answer.
        in_background: Whether its client did not wait for it.
    """

    response_id: str
    body: bytes
    turns: tuple[Turn, ...]
    previous: str | None
    input_bytes: int
    items: bytes = b"[]"
    done: bool = True
    in_background: bool = False

    @property
    def size(self) -> int:
        """Bytes that count for this response. The body counts twice, because ``turns`` hold its texts again."""
        return 2 * len(self.body) + self.input_bytes + len(self.items) + _OVERHEAD


class ResponseStore:
    """Keeps responses, each for the tenant who asked for it. The least recently used response is dropped first.

    Args:
        most: Responses that a tenant may have; 0: none is kept.
        most_bytes: Most bytes of all tenants together; beyond it, the tenant that has most gives way.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0

    @property
    def keeps(self) -> bool:
        """Whether it keeps any."""
        return self._most > 0

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._size

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Keeps a response, in the place of others where there is no room."""
        if not self.keeps or response.size > self._most_bytes:
            return
        kept = self._tenants.setdefault(tenant, OrderedDict())
        if (earlier := kept.pop(response.response_id, None)) is not None:
            self._count(tenant, -earlier.size)
        kept[response.response_id] = response
        self._count(tenant, response.size)
        if len(kept) > self._most:
            self._drop(tenant, next(iter(kept)))
        while self._size > self._most_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._tenants[largest])))

    def get(self, tenant: str, response_id: str, field: str | None = None) -> StoredResponse:
        """A response.

        Raises:
            NotFoundError: It is not kept, or not for this tenant.
        """
        kept = self._tenants.get(tenant)
        if kept is None or response_id not in kept:
            raise NotFoundError(f"there is no response {response_id[:100]!r} here, or no longer", field=field)
        return kept[response_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response.

        Raises:
            NotFoundError: As :meth:`get`.
        """
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    def history(self, tenant: str, response_id: str, field: str) -> tuple[Turn, ...]:
        """The conversation up to a response and with it; all of it counts as used.

        Raises:
            NotFoundError: The response, or one that it continues, is not kept; the error names ``field``.
            InvalidArgumentError: The conversation has more turns than are looked at in one piece.
        """
        chain: list[StoredResponse] = []
        turns = 0
        following: str | None = response_id
        while following is not None:
            chain.append(self.get(tenant, following, field))
            if not chain[-1].done:
                raise InvalidArgumentError(f"response {following!r} is still in progress", field=field)
            following = chain[-1].previous
            turns += len(chain[-1].turns)
            if turns > _MOST_TURNS:
                raise InvalidArgumentError(f"the conversation has more than {_MOST_TURNS} turns", field=field)
        kept = self._tenants[tenant]
        # The oldest last, so that it is dropped after those that go on from it: they are of no use without it.
        for response in chain:
            kept.move_to_end(response.response_id)
        return tuple(turn for response in reversed(chain) for turn in response.turns)

    def _drop(self, tenant: str, response_id: str) -> None:
        kept = self._tenants[tenant]
        self._count(tenant, -kept.pop(response_id).size)
        if not kept:
            del self._tenants[tenant], self._sizes[tenant]

    def _count(self, tenant: str, size: int) -> None:
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        self._size += size


_USUAL, _MOST = 20, 100


def listing(items: list[dict[str, Any]], query: Mapping[str, str]) -> bytes:
    """The body of a page.

    Args:
        items: All, in order.
        query: ``limit``, ``order`` (``desc`` is usual) and ``after``, the id of the item before the page.

    Raises:
        InvalidArgumentError: One of these makes no sense.
        NotFoundError: There is no item ``after``.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgumentError("order must be asc or desc", field="order")
    wanted = query.get("limit", str(_USUAL))
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) <= 3 and 1 <= int(wanted) <= _MOST):
        raise InvalidArgumentError(f"limit must be in 1..{_MOST}, got {wanted[:20]!r}", field="limit")
    if order == "desc":
        items = items[::-1]
    first = 0
    if (after := query.get("after")) is not None:
        first = next((index for index, item in enumerate(items, 1) if item.get("id") == after), 0)
        if not first:
            raise NotFoundError(f"there is no item {after[:100]!r}", field="after")
    page = items[first : first + int(wanted)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    more = first + len(page) < len(items)
    return msgspec.json.encode({"object": "list", "data": page, "has_more": more, **ends})
