"""``GET /v1/responses/ID/input_items``: a page of the items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError

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
