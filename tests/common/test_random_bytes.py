import os

from sapwood_common.random_bytes import random_bytes


def test_no_two_reads_are_alike_also_beyond_what_is_read_at_once() -> None:
    found = [random_bytes(16) for _ in range(1000)]
    assert {len(each) for each in found} == {16}
    assert len(set(found)) == 1000
    assert len(random_bytes(4)) == 4


def test_a_forked_process_reads_others() -> None:
    random_bytes(16)  # there is some left
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, random_bytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16) != random_bytes(16)
