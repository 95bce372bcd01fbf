"""Calls into processes that may be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from sapwood_worker.model.grammar.bounded_process import BoundedProcesses, ProcessDiedError, TimeUpError

TARGET = "sapwood_testing.models.bounded_targets:start"


@pytest.fixture
def processes() -> Iterator[Callable[[float], BoundedProcesses]]:
    made: list[BoundedProcesses] = []

    def make(timeout: float) -> BoundedProcesses:
        made.append(BoundedProcesses(TARGET, b"set", timeout, memory_bytes=1 << 30))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_process_is_used_again_and_what_it_prints_does_not_disturb_its_answers(processes):
    bounded = processes(60.0)
    bounded.warm()
    first, printed, second = (bounded.call(question).split() for question in (b"one", b"print", b"two"))
    assert (first[0], first[2], printed[2], second[2]) == (b"set", b"one", b"print", b"two")
    assert first[1] == second[1]


@pytest.mark.parametrize("question", [b"exit", b"memory"])
def test_a_process_that_dies_of_a_call_is_replaced(processes, question):
    bounded = processes(60.0)
    before = bounded.call(b"one").split()[1]
    with pytest.raises(ProcessDiedError):
        bounded.call(question)
    assert bounded.call(b"two").split()[1] != before


def test_a_call_that_takes_too_long_is_killed(processes):
    with pytest.raises(TimeUpError):
        processes(0.2).call(b"sleep")


def test_closing_ends_a_call_that_is_under_way(processes):
    bounded = processes(600.0)
    bounded.warm()
    ended: list[BaseException] = []

    def hang() -> None:
        try:
            bounded.call(b"sleep")
        except ProcessDiedError as error:
            ended.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    while not bounded.num_busy:
        thread.join(0.01)
    bounded.close()
    thread.join()
    assert len(ended) == 1
