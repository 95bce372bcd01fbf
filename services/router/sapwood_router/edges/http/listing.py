"""A page of a list, as OpenAI's API has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError


class PageQuery(msgspec.Struct, frozen=True):
    """Which page of a list is asked for.

    Attributes:
        limit: Most items of it.
        newest_first: The order.
        after: The id of the item before it; None: it is the first page.
    """

    limit: int
    newest_first: bool
    after: str | None


def page_query(query: Mapping[str, str], *, usual: int = 20, most: int = 100) -> PageQuery:
    """Reads ``limit``, ``order`` (``desc`` is usual) and ``after``.

    Args:
        query: The parameters.
        usual, most: The usual limit, and the largest.

    Raises:
        InvalidArgumentError: One of these makes no sense.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgumentError("order must be asc or desc", field="order")
    wanted = query.get("limit", str(usual))
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) <= 6 and 1 <= int(wanted) <= most):
        raise InvalidArgumentError(f"limit must be in 1..{most}, got {wanted[:20]!r}", field="limit")
    return PageQuery(int(wanted), order == "desc", query.get("after"))


def no_item(after: str) -> NotFoundError:
    """The error of a page that is to begin after an item that is not there."""
    return NotFoundError(f"there is no item {after[:100]!r}", field="after")


def page_body(page: list[dict[str, Any]], *, more: bool) -> bytes:
    """The body of a page; ``more``: items follow it."""
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"object": "list", "data": page, "has_more": more, **ends})


def listing(items: list[dict[str, Any]], query: Mapping[str, str], *, usual: int = 20, most: int = 100) -> bytes:
    """The body of a page of a list that is at hand.

    Args:
        items: All, in order.
        query: As for :func:`page_query`.
        usual, most: The usual limit, and the largest.

    Raises:
        InvalidArgumentError: The query makes no sense.
        NotFoundError: There is no item ``after``.
    """
    wanted = page_query(query, usual=usual, most=most)
    if wanted.newest_first:
        items = items[::-1]
    first = 0
    if wanted.after is not None:
        first = next((index for index, item in enumerate(items, 1) if item.get("id") == wanted.after), 0)
        if not first:
            raise no_item(wanted.after)
    page = items[first : first + wanted.limit]
    return page_body(page, more=first + len(page) < len(items))
