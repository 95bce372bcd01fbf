"""Events are the same however their bytes are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.errors import InternalError
from sapwood_router.transport.backend.client import event_data

_LINES = st.lists(st.text("ab :\x85é", max_size=5), min_size=1, max_size=3)


async def _read(pieces: list[bytes], most: int = 1000) -> list[bytes]:
    async def given_pieces() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return [data async for data in event_data(given_pieces(), most)]


@given(st.lists(_LINES, max_size=4), st.sampled_from(["\n", "\r\n", "\r"]), st.integers(1, 7))
async def test_any_cut_gives_the_same_events(events: list[list[str]], end: str, size: int) -> None:
    sent = ": a comment" + end + end
    for lines in events:
        sent += "event: x" + end + "".join(f"data: {line}{end}" for line in lines) + end
    raw = (sent + "data: cut off").encode()
    found = await _read([raw[at : at + size] for at in range(0, len(raw), size)])
    assert found == ["\n".join(lines).encode() for lines in events]


async def test_the_longest_event_is_bounded_and_not_how_many_there_are() -> None:
    assert len(await _read([b"data: x\n\n" * 1000], most=10)) == 1000
    with pytest.raises(InternalError, match="more than 10 bytes"):
        await _read([b"data: 1234", b"5"], most=10)
