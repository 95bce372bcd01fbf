"""What every store must do, asked of each: of files, NIXL over files and over an object store, Mooncake, and the tests' own."""

from __future__ import annotations

import importlib.util
import os
import random
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood_testing.worker.storage.fake_storage import FakeStorage
from sapwood_testing.worker.storage.mooncake_cluster import MooncakeCluster
from sapwood_testing.worker.storage.object_store import ObjectStoreServer
from sapwood_worker.core.cache.page_key import PageKey
from sapwood_worker.core.cache.storage.backend import StorageBackend, StorageError
from sapwood_worker.core.cache.storage.record import namespace_of, object_name, seal, verify
from sapwood_worker.core.cache.storage.store_factory import parse_storage
from sapwood_worker.model.pools.host_pool import HostPool

SPACE = namespace_of("model", 16)
PAGES = 8
Open = Callable[[], StorageBackend]


def key(index: int) -> PageKey:
    return PageKey(bytes([index]) * 16, bytes([index]) * 32)


NAMES = [object_name(SPACE, key(index)) for index in range(PAGES)]


def needs_nixl() -> None:
    if importlib.util.find_spec("nixl_cu12") is None and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    needs_nixl()
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = ObjectStoreServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["fake", "file", "nixl-posix", "nixl-obj", "mooncake"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens clients of one store."""
    objects: dict[str, bytes] = {}
    match request.param:
        case "fake":
            return lambda: FakeStorage(objects)
        case "file":
            return parse_storage(f"file://{tmp_path}/store")
        case "nixl-posix":
            needs_nixl()
            return parse_storage(f"nixl://posix{tmp_path}/store")
        case "nixl-obj":
            return parse_storage(f"nixl://obj/bucket?endpoint={request.getfixturevalue('bucket').url}")
        case _:
            cluster: MooncakeCluster = request.getfixturevalue("mooncake")
            return cluster.connect


def filled(seed: int, page_bytes: int = 5000) -> HostPool:
    """Sealed pages."""
    pool = HostPool(PAGES, page_bytes)
    pool.content[:] = np.random.default_rng(seed).integers(0, 255, pool.content.shape, np.uint8)
    for index in range(PAGES):
        seal(pool.record(index), key(index), SPACE)
    return pool


def records(pool: HostPool, *pages: int) -> list[memoryview]:
    return [pool.record(page) for page in pages]


def read(store: StorageBackend, pool: HostPool, *pages: int) -> list[bool]:
    """Reads objects into the pages of their numbers; for each whether it arrived as it was sealed."""
    names = [NAMES[page] for page in pages]
    try:
        answers = store.get(names, records(pool, *pages))
    except StorageError:
        return [False] * len(pages)
    return [there and verify(pool.record(page), key(page), SPACE) for page, there in zip(pages, answers, strict=True)]


def test_any_client_reads_what_one_has_put_until_it_is_removed(open_store: Open) -> None:
    mine, theirs = filled(1), HostPool(PAGES, 5000)
    writer, reader = open_store(), open_store()
    writer.register(mine.records)
    reader.register(theirs.records)
    assert reader.exists(NAMES) == 0
    assert writer.put(NAMES[:4], records(mine, 0, 1, 2, 3)) == [True] * 4
    assert writer.put(NAMES[2:5], records(mine, 2, 3, 4)) == [True] * 3, "what is there already is no error"
    writer.put(NAMES[6:7], records(mine, 6))
    assert (reader.exists(NAMES), reader.exists(NAMES[:2]), reader.exists(NAMES[5:])) == (5, 2, 0)
    assert read(reader, theirs, 3, 0, 4) == [True] * 3
    for page in (0, 3, 4):
        assert (theirs.content[page] == mine.content[page]).all()
    assert read(reader, theirs, 5, 1)[0] is False, "it is not there"
    assert read(reader, theirs, 1) == [True]
    assert not verify(theirs.record(1), key(2), SPACE)
    for size in (4000, 6000):
        other = HostPool(PAGES, size)
        reader.register(other.records)
        assert read(reader, other, 0) == [False], "it has another size"
    try:
        reader.clear(namespace_of("another"))
    except StorageError as error:
        assert "life cycle" in str(error), "only an object store leaves that to others"
    else:
        assert reader.exists(NAMES) == 5
        reader.remove([NAMES[1], NAMES[5]])
        assert writer.exists(NAMES) == 1
        writer.clear(SPACE)
        assert reader.exists(NAMES) == 0
    for store in (writer, reader):
        store.close()


@pytest.mark.parametrize(
    "instead", ["short", "empty", "long", "folder", "pipe", "link to nothing", "its folder is a file"]
)
@pytest.mark.parametrize("scheme", ["file://", "nixl://posix"])
def test_what_is_no_object_of_the_right_size_is_replaced_by_the_next_put(
    scheme: str, instead: str, tmp_path: Path
) -> None:
    if scheme.startswith("nixl"):
        needs_nixl()
    mine, theirs = filled(1), HostPool(PAGES, 5000)
    store = parse_storage(f"{scheme}{tmp_path}/store")()
    reader = parse_storage(f"{scheme}{tmp_path}/store")()
    store.register(mine.records)
    reader.register(theirs.records)
    store.put(NAMES[:2], records(mine, 0, 1))
    [path] = (tmp_path / "store" / "objects").rglob(NAMES[1].rpartition("/")[2])
    size = path.stat().st_size
    path.unlink()
    match instead:
        case "short" | "empty" | "long":
            path.write_bytes(bytes({"short": size - 1, "empty": 0, "long": size + 1}[instead]))
        case "folder":
            (path / "inner").mkdir(parents=True)
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case _:
            path.parent.rmdir()
            path.parent.write_bytes(b"x")
    assert read(reader, theirs, 1) == [False]
    assert store.put(NAMES[:2], records(mine, 0, 1)) == [True] * 2
    assert (reader.exists(NAMES), read(reader, theirs, 0, 1)) == (2, [True] * 2)


@pytest.mark.parametrize("removed", ["", "objects", "writing"])
def test_a_folder_that_was_removed_is_made_again(removed: str, tmp_path: Path) -> None:
    mine = filled(1)
    store = parse_storage(f"file://{tmp_path}/store?size_gb=0.0001")()  # so small that each put makes room
    store.put(NAMES[:1], records(mine, 0))
    shutil.rmtree(tmp_path / "store" / removed)
    assert store.put(NAMES[1:3], records(mine, 1, 2)) == [True] * 2
    assert (store.exists(NAMES[1:3]), store.get(NAMES[1:2], records(HostPool(PAGES, 5000), 1))) == (2, [True])


def test_calls_from_several_threads_at_once_move_whole_objects(open_store: Open) -> None:
    mine = filled(1)
    store = open_store()
    store.register(mine.records)
    pools = [HostPool(PAGES, 5000) for _ in range(4)]
    for pool in pools:
        store.register(pool.records)
    failures: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(10):
            own = [page for page in range(PAGES) if page % 4 == number]
            pages = chance.sample(range(PAGES), chance.randint(1, PAGES))
            try:
                if not all(store.put([NAMES[page] for page in own], records(mine, *own))):
                    failures.append("not written")
                if not all(read(store, pools[number], *own)):
                    failures.append("not read")
                arrived = read(store, pools[number], *pages)  # of others', all or nothing
                if any(
                    fine and (pools[number].content[page] != mine.content[page]).any()
                    for page, fine in zip(pages, arrived, strict=True)
                ):
                    failures.append("changed")
            except Exception as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_folder_is_the_same_store_for_files_and_for_nixl(tmp_path: Path) -> None:
    needs_nixl()
    mine, theirs = filled(1), HostPool(PAGES, 5000)
    files, nixl = (parse_storage(url)() for url in (f"file://{tmp_path}", f"nixl://posix{tmp_path}"))
    nixl.register(theirs.records)
    files.put(NAMES[:3], records(mine, 0, 1, 2))
    paths = {path.name: path for path in tmp_path.glob("objects/*/*/*")}
    short, changed, good = (paths[name.rpartition("/")[2]] for name in NAMES[:3])
    os.truncate(short, 100)
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    assert read(nixl, theirs, 0, 1, 2) == [False, False, True]
    good.unlink()
    assert nixl.put(NAMES[2:3], records(theirs, 2)) == [True]
    assert read(files, mine, 2) == [True]
    (tmp_path / "writing").rmdir()
    assert nixl.put(NAMES[3:4], records(theirs, 3)) == [True]


def test_an_object_store_that_fails_is_an_error_until_it_is_well_again(bucket: ObjectStoreServer) -> None:
    mine, theirs = filled(1), HostPool(PAGES, 5000)
    store = parse_storage(f"nixl://obj/bucket?endpoint={bucket.url}")()
    for pool in (mine, theirs):
        store.register(pool.records)
    store.put(NAMES[:2], records(mine, 0, 1))
    assert sorted(bucket.objects) == [f"bucket/{name}" for name in NAMES[:2]]
    bucket.failing = True
    calls: list[Callable[[], Any]] = [
        lambda: store.put(NAMES[2:3], records(mine, 2)),
        lambda: store.get(NAMES[:1], records(mine, 0)),
        lambda: store.exists(NAMES[:1]),
    ]
    for call in calls:
        with pytest.raises(StorageError):
            call()
    bucket.failing = False
    assert store.exists(NAMES) == 2
    name = f"bucket/{NAMES[0]}"
    for bad in (bucket.objects[name][:100], bucket.objects[f"bucket/{NAMES[1]}"], b""):
        bucket.objects[name] = bad
        theirs.content[:] = 0
        assert read(store, theirs, 0) == [False]
    assert store.put(NAMES[:1], records(mine, 0)) == [True], "the next put heals it"
    assert read(store, theirs, 0) == [True]


def test_nothing_arrives_any_more_once_a_read_has_failed_in_part(bucket: ObjectStoreServer) -> None:
    mine, theirs = filled(1), HostPool(PAGES, 5000)
    store = parse_storage(f"nixl://obj/bucket?endpoint={bucket.url}")()
    for pool in (mine, theirs):
        store.register(pool.records)
    assert store.put(NAMES[:3], records(mine, 0, 1, 2)) == [True] * 3
    late = bucket.gates[f"bucket/{NAMES[2]}"] = threading.Event()
    del bucket.objects[f"bucket/{NAMES[0]}"]
    threading.Timer(0.3, late.set).start()  # long after the others have been answered
    assert read(store, theirs, 0, 1, 2) == [False, True, True], "it did not wait for the last"


def test_without_nixl_there_is_an_error_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nixl", "nixl._api", "nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StorageError, match=r"pip install 'sapwood\[nixl\]'"):
        parse_storage(f"nixl://posix{tmp_path}")()


@pytest.mark.parametrize("scheme", ["file://", "nixl://posix"])
def test_a_full_disk_is_an_error_and_leaves_nothing_behind(scheme: str, tmp_path: Path) -> None:
    if scheme != "file://":
        needs_nixl()
    mine = filled(1)
    store = parse_storage(f"{scheme}{tmp_path}")()
    store.register(mine.records)
    assert store.put(NAMES[:1], records(mine, 0)) == [True]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # no file may grow beyond: as on a disk without room
    try:
        with pytest.raises(StorageError):
            store.put(NAMES[:4], records(mine, 0, 1, 2, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.exists(NAMES) == 1
    assert not list((tmp_path / "writing").iterdir())
    assert store.put(NAMES[:4], records(mine, 0, 1, 2, 3)) == [True] * 4
    assert store.exists(NAMES) == 4


@pytest.mark.slow
def test_a_full_mooncake_makes_room_or_refuses_and_never_gives_wrong_bytes(mooncake: MooncakeCluster) -> None:
    pool = filled(1, 8 << 20)
    store = mooncake.connect()
    store.register(pool.records)
    taken = []
    for number in range(5 * PAGES):  # 320 MiB into 256
        page = number % PAGES
        try:
            taken += store.put([f"{NAMES[page]}-{number}"], records(pool, page))
        except StorageError:
            taken.append(False)
    assert taken[0]
    content = pool.content.copy()
    for number, fine in enumerate(taken):
        page = number % PAGES
        pool.content[page] = 0
        try:
            [there] = store.get([f"{NAMES[page]}-{number}"], records(pool, page))
        except StorageError:
            there = False
        assert not there or (fine and (pool.content[page] == content[page]).all())
    store.close()
