from sapwood.v1 import router_pb2, tokenizer_pb2
from sapwood_common.serving.wire import _MOST_LOOKED_AT, count_fields, find_invalid_utf8


def test_names_the_repeated_string_that_is_not_utf8() -> None:
    raw = tokenizer_pb2.TokenizeRequest(texts=["good", "bad!"]).SerializeToString().replace(b"bad!", b"ba\xff!")
    assert find_invalid_utf8(raw, tokenizer_pb2.TokenizeRequest.DESCRIPTOR) == "texts"


def test_names_a_nested_field_by_its_path() -> None:
    request = router_pb2.RouterGenerateRequest(
        messages=router_pb2.ChatMessages(messages=[{"role": "user", "content": "abcd"}])
    )
    raw = request.SerializeToString().replace(b"abcd", b"ab\xc3\x28")
    assert find_invalid_utf8(raw, router_pb2.RouterGenerateRequest.DESCRIPTOR) == "messages.messages.content"


def test_a_good_message_and_plain_garbage_name_nothing() -> None:
    good = router_pb2.RouterGenerateRequest(text="ok", stop=["x"]).SerializeToString()
    assert find_invalid_utf8(good, router_pb2.RouterGenerateRequest.DESCRIPTOR) is None
    for garbage in (b"\xff", b"\xff" * 40, b"\x1a\x7f", b"\x0b\x0c"):
        assert find_invalid_utf8(garbage, router_pb2.RouterGenerateRequest.DESCRIPTOR) is None


def test_fields_are_counted_with_those_of_messages_within_and_no_further_than_asked() -> None:
    descriptor = router_pb2.RouterGenerateRequest.DESCRIPTOR
    turns = [{"role": "user", "content": "a" * 1000}] * 10
    request = router_pb2.RouterGenerateRequest(messages=router_pb2.ChatMessages(messages=turns), stop=["x", ""])
    assert count_fields(request.SerializeToString(), descriptor, 100) == 2 + 1 + 10 * (1 + 2)
    assert count_fields(request.SerializeToString(), descriptor, 20) == 21
    assert count_fields(b"", descriptor, 20) == 0
    for garbage in (b"\xff", b"\xff" * 40, b"\x1a\x7f", b"\x0b\x0c"):
        assert count_fields(garbage, descriptor, 20) <= 1
    assert count_fields(bytes(1 << 24), descriptor, 1000) == 1001


class Counted(bytes):
    """Bytes that count how many of them are looked at."""

    looked_at = 0

    def __getitem__(self, key):
        self.looked_at += 1
        return super().__getitem__(key)


def test_what_is_at_fault_is_looked_for_among_a_bounded_number_of_fields() -> None:
    """Sixteen megabytes of zeros would take seconds."""
    zeros = Counted(1 << 24)
    assert find_invalid_utf8(zeros, router_pb2.RouterGenerateRequest.DESCRIPTOR) is None
    assert 0 < zeros.looked_at <= 2 * _MOST_LOOKED_AT
