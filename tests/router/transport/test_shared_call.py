"""Messages that take long are handled in several turns of the event loop."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from sapwood_common.network.channel import Dialer
from sapwood_net.http2.client.duplex_call import CallEndedError, DuplexCall
from sapwood_router.transport import shared_call
from sapwood_router.transport.shared_call import SharedCall


class Call:
    """Stands for a call: what is read of it, and its end."""

    ready = True
    socket = None

    def __init__(self) -> None:
        self.reads = [True]
        self.ended: asyncio.Future[CallEndedError] = asyncio.get_running_loop().create_future()
        self.receive: Callable[[bytes], None]

    def follow(self, on_message: Callable[[bytes], None], on_ready: Callable[[], None]) -> None:
        self.receive = on_message

    async def wait_ended(self) -> CallEndedError:
        return await self.ended

    def set_reading(self, reads: bool) -> None:
        self.reads.append(reads)

    def close(self, reason: str = "closed here") -> None:
        if not self.ended.done():
            self.ended.set_result(CallEndedError(grpc.StatusCode.CANCELLED, reason))


class Counting(SharedCall):
    """Each byte of a message is a piece of work that takes 0.6 ms; "!" fails."""

    def __init__(self, dialer: Dialer | None = None) -> None:
        super().__init__("nowhere:1", "/Method", dialer or Dialer())
        self.handled = b""
        self.lost: list[str] = []

    @property
    def load(self) -> int:
        return 0

    def _opened(self, call: DuplexCall) -> bytes:
        return b""

    def _next_message(self) -> bytes | None:
        return None

    def _take(self, message: bytes) -> Iterator[None]:
        for byte in message:
            yield
            until = time.perf_counter() + 0.0006
            while time.perf_counter() < until:
                pass
            assert byte != ord("!")
            self.handled += bytes((byte,))

    def _lost(self, end: CallEndedError) -> float:
        self.lost.append(str(end))
        return 10.0

    def _stopped(self) -> None:
        pass


@pytest.fixture
async def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    call = Call()

    async def open_call(*_: object) -> Call:
        return call

    monkeypatch.setattr(shared_call, "open_call", open_call)
    return call


async def _opened(counting: Counting) -> asyncio.Task[None]:
    running = asyncio.ensure_future(counting.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return running


async def test_others_get_turns_between_and_nothing_more_is_read_meanwhile(call: Call) -> None:
    counting = Counting()
    running = await _opened(counting)
    call.receive(b"abcdefghijkl")
    call.receive(b"mn")
    seen = [counting.handled]
    while counting.handled != b"abcdefghijklmn":
        await asyncio.sleep(0)
        if counting.handled != seen[-1]:
            seen.append(counting.handled)
    assert len(seen) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert call.reads == [True, False, True]
    running.cancel()


async def test_calls_of_one_dialer_share_the_time_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many workers answer at once, others have their turns between."""
    calls: list[Call] = []

    async def open_call(*_: object) -> Call:
        calls.append(Call())
        return calls[-1]

    monkeypatch.setattr(shared_call, "open_call", open_call)
    dialer = Dialer()
    counting = [Counting(dialer if number % 2 else dialer.expecting("a name")) for number in range(20)]
    running = [await _opened(each) for each in counting]
    for each in calls:
        each.receive(b"abcdef")
    most, handled = 0, sum(len(each.handled) for each in counting)
    while handled < 120:
        await asyncio.sleep(0)
        before, handled = handled, sum(len(each.handled) for each in counting)
        most = max(most, handled - before)
    assert most <= 4  # in one millisecond, each takes 0.6
    for each in running:
        each.cancel()


async def test_what_came_before_the_end_counts(call: Call) -> None:
    counting = Counting()
    running = await _opened(counting)
    call.receive(b"abcdefghijkl")
    call.receive(b"mn")
    call.close("it ended")
    while not counting.lost:
        await asyncio.sleep(0)
    assert counting.handled == b"abcdefghijklmn"
    running.cancel()


async def test_a_failure_in_a_later_turn_ends_the_call(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    counting = Counting()
    running = await _opened(counting)
    call.receive(b"abcdefgh!jkl")
    call.receive(b"mn")
    while not counting.lost:
        await asyncio.sleep(0)
    assert counting.handled == b"abcdefgh"
    assert "AssertionError" in counting.lost[0]
    running.cancel()
