import logging
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sapwood.v1 import tokenizer_pb2
from sapwood_common.telemetry.logs import request_id_var
from sapwood_text.detokenizer import Detokenizer
from sapwood_text.output_parser import OutputParser
from sapwood_text.parsed_stream import ParsedStream, StreamOptions
from sapwood_tokenizer.serve.detokenize_call import DetokenizeCall
from sapwood_tokenizer.serve.open_streams import OpenStreams
from sapwood_tokenizer.vocab.loader import token_table


def make_call(tokenizer: Tokenizer, most: int = 100) -> DetokenizeCall:
    table = token_table(tokenizer)

    def open_stream(options: StreamOptions) -> ParsedStream:
        return ParsedStream(Detokenizer(table, options.stop, frozenset()), OutputParser(options.parsers))

    return DetokenizeCall(open_stream, tokenizer.get_vocab_size(), OpenStreams(most, 1000))


def request(*inputs: dict[str, object]) -> tokenizer_pb2.DetokenizeRequest:
    return tokenizer_pb2.DetokenizeRequest(inputs=[tokenizer_pb2.DetokenizeInput(**i) for i in inputs])  # type: ignore[arg-type]


def answers(call: DetokenizeCall, *inputs: dict[str, object]) -> list[tokenizer_pb2.DetokenizeOutput]:
    return [output for step in call.process(request(*inputs)) for output in step.outputs]


OPEN = tokenizer_pb2.DetokenizeOptions()


def test_an_input_of_very_many_tokens_is_taken_in_steps(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("word é " * 2000).ids
    call = make_call(byte_level)
    steps = list(call.process(request({"stream_id": 1, "options": OPEN, "token_ids": ids, "end": True})))
    assert len(steps) > 3
    outputs = [output for step in steps for output in step.outputs]
    assert "".join(o.text for o in outputs) == "word é " * 2000
    assert [o.ended for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].tokens_consumed == len(ids)
    assert call.idle


def test_a_stop_string_within_many_tokens_ends_the_stream_once(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b " * 1500 + "STOP" + " c d" * 3000).ids
    options = tokenizer_pb2.DetokenizeOptions(stop=["STOP"])
    outputs = answers(make_call(byte_level), {"stream_id": 1, "options": options, "token_ids": ids, "end": True})
    assert "".join(o.text for o in outputs) == "a b " * 1500
    assert [o.stop_match for o in outputs if o.ended] == ["STOP"]
    assert outputs[-1].ended


def test_more_streams_than_allowed_are_refused_one_by_one(byte_level: Tokenizer) -> None:
    call = make_call(byte_level, most=2)
    outputs = answers(call, *({"stream_id": n, "options": OPEN, "token_ids": [70]} for n in range(4)))
    assert [o.error.code for o in outputs] == [0, 0, 8, 8]
    (ended,) = answers(call, {"stream_id": 0, "end": True})
    assert ended.ended and not ended.HasField("error")
    (opened,) = answers(call, {"stream_id": 9, "options": OPEN, "token_ids": [70]})
    assert not opened.ended
    call.close()
    assert call.idle


def test_a_fault_in_one_stream_ends_that_stream_alone(byte_level: Tokenizer) -> None:
    table = token_table(byte_level)
    made: list[ParsedStream] = []

    class Broken(ParsedStream):
        def push(self, token_ids):  # type: ignore[no-untyped-def]
            raise RecursionError

    def open_stream(options: StreamOptions) -> ParsedStream:
        kind = ParsedStream if made else Broken
        made.append(kind(Detokenizer(table, [], frozenset()), OutputParser(options.parsers)))
        return made[-1]

    call = DetokenizeCall(open_stream, 400, OpenStreams(10, 1000))
    options = tokenizer_pb2.DetokenizeOptions(tool_call_id_seed="req-7.abcd")
    log = logging.getLogger("sapwood_tokenizer.serve.detokenize_call")
    named: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            named.append(request_id_var.get())

    heard = Heard()
    log.addHandler(heard)
    try:
        outputs = answers(call, *({"stream_id": n, "options": options, "token_ids": [70]} for n in (1, 2)))
    finally:
        log.removeHandler(heard)
    assert named == ["req-7.abcd"]
    assert [(o.ended, o.error.code) for o in outputs] == [(True, 13), (False, 0)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), texts=st.lists(st.text(max_size=30), min_size=1, max_size=6))
def test_any_interleaving_of_streams_gives_each_its_text(byte_level: Tokenizer, seed: int, texts: list[str]) -> None:
    chance = random.Random(seed)
    call = make_call(byte_level)
    left = {n: byte_level.encode(text).ids for n, text in enumerate(texts)}
    got = dict.fromkeys(left, "")
    fresh = set(left)
    while left:
        inputs: list[dict[str, object]] = []
        for n in chance.sample(sorted(left), chance.randint(1, len(left))):
            size = chance.randint(0, 4)
            item: dict[str, object] = {"stream_id": n, "token_ids": left[n][:size]}
            left[n] = left[n][size:]
            if n in fresh:
                fresh.discard(n)
                item["options"] = OPEN
            if not left[n] and chance.random() < 0.5:
                item["end"] = True
                del left[n]
            inputs.append(item)
        for output in answers(call, *inputs):
            got[output.stream_id] += output.text
    assert list(got.values()) == texts
    assert call.idle
