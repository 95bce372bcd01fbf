import asyncio

import pytest

from sapwood_common.errors import ResourceExhaustedError
from sapwood_tokenizer.serve.open_streams import OpenStreams


async def test_only_so_many_streams_are_open_at_a_time() -> None:
    streams = OpenStreams(most=2, most_option_bytes=100)
    streams.opened(60)
    with pytest.raises(ResourceExhaustedError, match="memory"):
        streams.opened(41)
    streams.opened(40)
    with pytest.raises(ResourceExhaustedError, match="2 streams"):
        streams.opened(0)
    streams.closed(60)
    streams.opened(50)


async def test_waiting_ends_when_the_last_stream_is_closed() -> None:
    streams = OpenStreams(most=10, most_option_bytes=100)
    await streams.wait_until_none()
    streams.opened(1)
    streams.opened(1)
    waiting = asyncio.create_task(streams.wait_until_none())
    streams.closed(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    streams.closed(1)
    await waiting
