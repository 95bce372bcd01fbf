import asyncio

from sapwood_net.pacing.write_batch import WriteBatch


class Recorder(asyncio.Transport):
    """Keeps what is written; ``order`` is shared."""

    def __init__(self, name: str, order: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.name, self.order, self.closing = name, order, False

    def write(self, data: bytes) -> None:
        self.order.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


async def test_writes_of_one_loop_turn_leave_in_one_write_before_tasks_continue() -> None:
    order: list[tuple[str, bytes]] = []
    batch, first, second, gone = WriteBatch(), *(Recorder(name, order) for name in ("first", "second", "gone"))
    woken = asyncio.get_running_loop().create_future()

    async def end() -> None:
        await woken
        first.write(b"end")

    ending = asyncio.ensure_future(end())
    await asyncio.sleep(0)
    for transport, data in ((first, b"1"), (second, b"2"), (gone, b"3"), (first, b"4")):
        batch.add(transport, data)
    woken.set_result(None)
    assert order == []
    gone.closing = True
    await ending
    assert order == [("first", b"14"), ("second", b"2"), ("first", b"end")]
    batch.add(second, b"5")
    await asyncio.sleep(0)
    assert order[-1] == ("second", b"5")


async def test_what_is_flushed_or_much_does_not_wait() -> None:
    order: list[tuple[str, bytes]] = []
    batch, first, second = WriteBatch(), Recorder("first", order), Recorder("second", order)
    batch.add(first, b"1")
    batch.add(second, b"2")
    batch.flush(first)
    batch.flush(first)
    assert order == [("first", b"1")]
    batch.add(second, b"x" * 5000)
    assert order[1:] == [("second", b"2" + b"x" * 5000)]
    for _ in range(10):
        batch.add(first, b"y" * 500)
    assert order[2:] == [("first", b"y" * 4500)]
    await asyncio.sleep(0)
    assert order[3:] == [("first", b"y" * 500)]
