"""What a rank shows of itself."""

from __future__ import annotations

import pytest

from sapwood_worker.records.ranks import AT_REST, DEVICE, WAITS_BYTES, Shown, Waits

OTHERS = 0b1010


def test_a_rank_shows_whom_it_waits_for_and_how_long_it_computed_between() -> None:
    now = 0.0
    memory = bytearray(WAITS_BYTES)
    waits = Waits(memory, lambda: now)
    assert Shown.of(memory).waits_for == AT_REST
    with waits.step(8):
        now = 3.0
        shown = Shown.of(memory)
        assert (shown.waits_for, shown.entered) == (0, 0)
        assert shown.allowed == 30.0, "nothing is known yet"
        with waits.exchange(OTHERS):
            shown = Shown.of(memory)
            assert (shown.waits_for, shown.entered, shown.last) == (OTHERS, 1, 3.0)
            now = 50.0
        with waits.on(1):  # is not what all ranks of the stage do
            assert Shown.of(memory).entered == 1
        later = Shown.of(memory)
        assert later.moves > shown.moves
        assert (later.waits_for, later.last) == (0, 0.0), "waiting is no computation"
        assert later.allowed == 30.0, "what comes next in the step may take longer than what came first"
    assert Shown.of(memory).waits_for == AT_REST
    with waits.step(8):
        assert Shown.of(memory).allowed == 12.0


def test_a_computation_may_take_four_times_the_time_of_others_by_size() -> None:
    now = 0.0
    memory = bytearray(WAITS_BYTES)
    waits = Waits(memory, lambda: now)
    for tokens, seconds in ((16, 0.5), (17, 0.25), (1, 0.125)):
        with waits.step(tokens):
            now += seconds
    found = {}
    for tokens in (1, 2, 31, 32, 256):
        with waits.step(tokens):
            found[tokens] = Shown.of(memory).allowed
    assert found == {1: 0.5, 2: 1.0, 31: 2.0, 32: 4.0, 256: 32.0}


def test_a_rank_with_a_device_counts_launches_and_the_time_of_both() -> None:
    now = 0.0
    memory = bytearray(WAITS_BYTES)
    waits = Waits(memory, lambda: now)
    with pytest.raises(RuntimeError), waits.launch(8, asynchronous=True):
        assert Shown.of(memory).launched == 0
        now += 0.5
        raise RuntimeError("it fails, and is over")
    assert Shown.of(memory).launched == 1
    with waits.on(0), waits.on(DEVICE):
        assert Shown.of(memory).waits_for == DEVICE
        now += 3.0
    assert Shown.of(memory).allowed == 30.0
    with waits.launch(8, asynchronous=True):
        assert Shown.of(memory).allowed == 12.0, "the device's time counts"
        now += 5.0
    shown = Shown.of(memory)
    assert (shown.launched, shown.allowed) == (2, 20.0), "others that launch the same may take as long"
    with waits.launch(8, asynchronous=False):
        pass
    assert Shown.of(memory).launched == 2
