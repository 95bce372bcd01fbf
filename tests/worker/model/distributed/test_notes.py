"""Values that ranks exchange from any thread, by the store at which they have met."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore

from sapwood_common.errors import InternalError
from sapwood_worker.model.distributed import notes
from sapwood_worker.model.distributed.notes import Notes, StoreNotes


def test_a_rank_alone_gets_its_own_value() -> None:
    assert Notes().exchange("one", 3, int) == [3]


def test_every_rank_gets_all_values_in_order_from_several_threads_at_once(tmp_path: Path) -> None:
    ranks = [StoreNotes(PrefixStore("notes", FileStore(str(tmp_path / "store"), 3)), rank, 3) for rank in range(3)]
    start = threading.Barrier(12)

    def exchange(rank: int, name: int) -> list[tuple[int, bytes]]:
        start.wait()
        return ranks[rank].exchange(f"value {name}", (10 * rank + name, b"\0\xff"), tuple[int, bytes])

    with ThreadPoolExecutor(12) as threads:
        calls = {(rank, name): threads.submit(exchange, rank, name) for rank in range(3) for name in range(4)}
        for (_, name), call in calls.items():
            assert call.result() == [(10 * rank + name, b"\0\xff") for rank in range(3)]


def test_what_is_no_value_of_the_kind_is_refused_and_who_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    store.set("one/0", "no msgpack of a number, certainly")
    with pytest.raises(msgspec.MsgspecError):
        StoreNotes(store, 1, 2).exchange("one", 1, int)
    monkeypatch.setattr(notes, "_MOST_SECONDS", 0.05)
    with pytest.raises(InternalError, match="rank 1 did not answer"):
        StoreNotes(store, 0, 2).exchange("two", 1, int)
