"""The third tier's parts: what stores keep, what is believed of it, and when they are left alone."""

from __future__ import annotations

import os
import random
import socket
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest

from sapwood_common.contract.page_hash import hash_pages
from sapwood_common.errors import ConfigError
from sapwood_testing.worker.storage.mooncake_cluster import mooncake_is_installed
from sapwood_worker.core.cache.page_key import PageChain, PageKey
from sapwood_worker.core.cache.storage.backend import StorageError, ThreadExecutor
from sapwood_worker.core.cache.storage.connection import NEVER, CircuitBreaker
from sapwood_worker.core.cache.storage.file import FileStorage
from sapwood_worker.core.cache.storage.mooncake_store import MooncakeOptions, MooncakeStorage
from sapwood_worker.core.cache.storage.opener import break_even
from sapwood_worker.core.cache.storage.record import namespace_of, seal, verify
from sapwood_worker.core.cache.storage.store_factory import parse_storage
from sapwood_worker.model.pools.host_pool import HostPool, available_memory, host_pool_pages
from sapwood_worker.model.pools.page_movers import record_addresses

SPACE = namespace_of("model", 16)
KEY = PageKey(b"h" * 16, b"p" * 32)


def buffer(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


def sealed(size: int = 1000) -> memoryview:
    pool = HostPool(1, size)
    pool.content[:] = np.random.default_rng(3).integers(0, 255, pool.content.shape, np.uint8)
    record = pool.record(0)
    seal(record, KEY, SPACE)
    return record


def test_keys_are_the_hashes_that_the_router_knows() -> None:
    tokens = array("I", range(40))
    chain = PageChain(b"salt", 8)
    chain.extend(tokens, 17)
    chain.extend(tokens, 40)
    assert [key.hash for key in chain.keys] == hash_pages(tokens, 8, salt=b"salt")
    assert len({key.proof for key in chain.keys}) == 5


def test_keys_of_other_namespaces_and_other_beginnings_differ() -> None:
    def keys(namespace: bytes, first: int) -> list[PageKey]:
        chain = PageChain(namespace, 4)
        chain.extend(array("I", [first, *range(11)]), 12)
        return chain.keys

    base, salted, other = keys(b"", 1), keys(b"salt", 1), keys(b"", 2)
    for different in (salted, other):
        assert all(a.hash != b.hash and a.proof != b.proof for a, b in zip(base, different, strict=True))


def test_a_record_passes_only_for_what_it_was_sealed() -> None:
    record = sealed()
    assert verify(record, KEY, SPACE)
    assert not verify(record, PageKey(KEY.hash, b"q" * 32), SPACE)
    assert not verify(record, PageKey(b"i" * 16, KEY.proof), SPACE)
    assert not verify(record, KEY, namespace_of("model", 8))


def test_any_changed_byte_is_noticed() -> None:
    record = sealed(300)
    changed = [index for index in range(len(record)) if not _passes_with_change(record, index)]
    # All but the padding between the checksum and the content.
    assert changed == [*range(96), *range(128, len(record))]


def _passes_with_change(record: memoryview, index: int) -> bool:
    record[index] ^= 1
    passes = verify(record, KEY, SPACE)
    record[index] ^= 1
    return passes


def test_a_store_of_files_gives_back_what_was_put(tmp_path: Path) -> None:
    store = FileStorage(tmp_path / "new", 1 << 20)
    names = [f"{SPACE}/{index:032x}" for index in range(3)]
    assert store.exists(names) == 0
    assert store.put(names, [buffer(bytes([index]) * 100) for index in range(3)]) == [True] * 3
    assert store.exists([*names, f"{SPACE}/{9:032x}"]) == 3
    other = FileStorage(tmp_path / "new", 1 << 20)
    read = [buffer(b"?" * 100), buffer(b"?" * 100), buffer(b"?" * 99)]
    assert other.get([names[1], f"{SPACE}/{9:032x}", names[0]], read) == [True, False, False]
    assert bytes(read[0]) == b"\x01" * 100
    store.remove([names[0], names[0]])
    assert store.exists(names) == 0
    store.clear(SPACE)
    assert store.get(names[1:2], [buffer(b"?" * 100)]) == [False]
    assert not list((tmp_path / "new" / "writing").iterdir())


def test_a_full_store_of_files_drops_the_least_recently_used(tmp_path: Path) -> None:
    store = FileStorage(tmp_path, 10_000)
    names = [f"{SPACE}/{index:032x}" for index in range(10)]
    for age, name in enumerate(names):
        store.put([name], [buffer(bytes(1000))])
        path = next(tmp_path.glob(f"objects/*/*/{name[-32:]}"))
        os.utime(path, (1e9 + age, 1e9 + age))
    store.get(names[:1], [buffer(bytes(1000))])  # as good as new
    store.put([f"{SPACE}/{99:032x}"], [buffer(bytes(1000))])
    left = [store.exists([name]) for name in names]
    assert left == [1, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert store.exists([f"{SPACE}/{99:032x}"]) == 1


def test_many_writers_of_one_folder_leave_whole_objects_only(tmp_path: Path) -> None:
    names = [f"{SPACE}/{index:032x}" for index in range(20)]

    def write(writer: int) -> None:
        store = FileStorage(tmp_path, 15_000)
        chance = random.Random(writer)
        for _ in range(60):
            index = chance.randrange(20)
            store.put([names[index]], [buffer(bytes([index]) * 1000)])
            read = buffer(bytes(1000))
            if store.get([names[index]], [read])[0]:
                assert bytes(read) == bytes([index]) * 1000

    failures: list[BaseException] = []

    def guarded(writer: int) -> None:
        try:
            write(writer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(path.stat().st_size for path in tmp_path.glob("objects/*/*/*")) <= 20_000


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot use the folder"):
        FileStorage(tmp_path / "file", 1000)


def test_the_breaker_opens_after_three_failures_and_lets_one_probe_through() -> None:
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    assert breaker.is_open and not breaker.allow()
    now = 1.5
    assert breaker.allow() and not breaker.allow()
    breaker.failed()
    now = 3.0
    assert not breaker.allow(), "the pause did not grow"
    now = 3.6
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.allow() and breaker.allow()


def test_a_success_in_between_forgives_failures() -> None:
    breaker = CircuitBreaker(lambda: 0.0)
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert not breaker.is_open


def test_every_job_ends_in_the_callers_thread_even_if_the_executor_closes() -> None:
    executor = ThreadExecutor(threads=2)
    gate, began = threading.Event(), threading.Semaphore(0)
    ends: list[tuple[object, object, str]] = []

    def note(result: object, error: Exception | None) -> None:
        ends.append((result, None if error is None else str(error), threading.current_thread().name))

    def work() -> bool:
        began.release()
        return gate.wait()

    for _ in range(2):
        executor.submit(work, note, urgent=False)
    for _ in range(2):
        began.acquire()
    executor.submit(lambda: 1 / 0, note, urgent=True)
    executor.poll()
    assert not ends
    executor.close()
    gate.set()
    while len(ends) < 3:
        executor.wait(0.1)
        executor.poll()
    main = threading.current_thread().name
    assert sorted(ends, key=str) == sorted(
        [(True, None, main), (True, None, main), (None, "the store was detached", main)], key=str
    )


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("somewhere", "names no kind of store.*file, mooncake, nixl"),
        ("file:relative", "absolute folder"),
        ("file://host/folder", "absolute folder"),
        ("file:///x?size_gb=big", "not a number"),
        ("file:///x?size_gb=0", "more than 0"),
        ("file:///x?colour=red", "colour"),
        ("mooncake://127.0.0.1:1", "metadata"),
        ("mooncake://?metadata=http://x", "master"),
        ("mooncake://m:1?metadata=http://x&protocol=pigeon", "tcp or rdma"),
        ("nixl://pigeon/x", "nixl://posix/ or nixl://obj/"),
        ("nixl://posix", "absolute folder"),
        ("nixl://posix/x?size_gb=0", "more than 0"),
        ("nixl://obj/", "name a bucket"),
        ("nixl://obj/a/b", "name a bucket"),
        ("nixl://obj/a?endpoint=host:9", "endpoint must be a URL"),
        ("nixl://obj/a?size_gb=9", "size_gb"),
    ],
)
def test_a_wrong_url_is_refused_with_its_reason(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_storage(url)


def test_a_package_can_bring_a_kind_of_store(plugin) -> None:
    plugin(
        "sapwood.storage",
        "drawer",
        """
        def parse_url(url):
            label = url.take("label")
            return lambda: f"the drawer {label} of {url.host}"
        """,
        "parse_url",
    )
    assert parse_storage("drawer://desk?label=left")() == "the drawer left of desk"
    with pytest.raises(ConfigError, match="colour"):
        parse_storage("drawer://desk?colour=red")
    with pytest.raises(ConfigError, match="drawer, file, mooncake, nixl"):
        parse_storage("shelf://desk")


def test_fetching_pays_from_where_it_beats_computing() -> None:
    assert break_even(fixed=0.010, each=0.001, compute=0.003) == 5
    assert break_even(fixed=0.0, each=0.001, compute=0.003) == 1
    assert break_even(fixed=0.010, each=0.003, compute=0.003) == NEVER


def test_the_host_pool_is_sized_by_memory_or_ratio_and_must_fit() -> None:
    assert host_pool_pages(page_bytes=1000, num_device_pages=10, gigabytes=0, ratio=0) == 0
    assert host_pool_pages(page_bytes=1000, num_device_pages=10, gigabytes=0, ratio=2.5) == 25
    assert host_pool_pages(page_bytes=(1 << 20) - 128, num_device_pages=10, gigabytes=0.5, ratio=9) == 512
    with pytest.raises(ConfigError, match="not even one page"):
        host_pool_pages(page_bytes=1 << 30, num_device_pages=10, gigabytes=0.5, ratio=0)
    with pytest.raises(ConfigError, match="does not fit"):
        host_pool_pages(page_bytes=1000, num_device_pages=10, gigabytes=1e6, ratio=0)


def test_the_control_groups_limit_counts_but_not_what_it_could_drop(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    50 kB\n")
    assert available_memory(tmp_path, meminfo) == 50 * 1024
    (tmp_path / "memory.max").write_text("20000\n")
    (tmp_path / "memory.current").write_text("15000\n")
    (tmp_path / "memory.stat").write_text("anon 7000\ninactive_file 3000\n")
    assert available_memory(tmp_path, meminfo) == 8000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, meminfo) == 50 * 1024


def test_copy_engines_are_given_the_addresses_of_pages_contents() -> None:
    pool = HostPool(5, 1000)
    addresses = record_addresses(pool, np.array([3, 0, 4], np.int32)).tolist()
    assert addresses == [pool.content[page].ctypes.data for page in (3, 0, 4)]


def test_a_mooncake_master_that_hangs_is_given_up() -> None:
    if not mooncake_is_installed():
        pytest.skip("Mooncake or its libraries are not here; see tests/system.sh")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        options = MooncakeOptions(address, f"http://{address}/metadata")
        with pytest.raises(StorageError, match="does not"):
            MooncakeStorage(options, patience=1.0)
