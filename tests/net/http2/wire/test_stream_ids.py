from sapwood_net.http2.wire.stream_ids import StreamIds


def test_streams_are_idle_until_they_are_opened_and_those_passed_over_never_are() -> None:
    ids = StreamIds()
    assert all(ids.is_idle(stream) for stream in (0, 1, 2, 3))
    ids.open(1)
    ids.open(3)
    ids.open(9)
    assert [stream for stream in range(12) if ids.is_idle(stream)] == [0, 2, 4, 6, 8, 10, 11]
    assert [stream for stream in range(12) if ids.is_skipped(stream)] == [5, 7]
    assert ids.last == 9


def test_the_first_stream_may_pass_others_over() -> None:
    ids = StreamIds()
    ids.open(5)
    assert [stream for stream in range(8) if ids.is_skipped(stream)] == [1, 3]


def test_late_frames_on_streams_that_ended_here_first_are_tolerated() -> None:
    ids = StreamIds()
    for stream in range(1, 10_001, 2):
        ids.open(stream)
        if stream % 4 == 1:
            ids.cut_off(stream)
    assert ids.may_be_late(9_997)
    assert not ids.may_be_late(9_999)
    assert ids.may_be_late(3)  # too long ago to know
    assert len(ids._cut_off) <= 1024
