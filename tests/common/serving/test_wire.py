from sapwood.v1 import router_pb2, tokenizer_pb2
from sapwood_common.serving.wire import find_invalid_utf8


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
