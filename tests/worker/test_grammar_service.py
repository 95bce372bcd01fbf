"""Structured output over a worker's gRPC: compiled elsewhere, compiled here, resumed, refused. Tokens are bytes; no model."""

from __future__ import annotations

import json
import re

import grpc
import pytest

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary
from sapwood_common.network.channel import open_channel
from sapwood_common.status import from_rpc_error
from sapwood_testing.worker.asking import collect

PATTERN = "[a-f]{10,20}:[0-9]{5}"
SUMS = """
root ::= digit rest rest rest
rest ::= ("+" | "-") digit
digit ::= [0-9]
"""
CALL = {
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"enum": [{"x": 1}, {"x": 2}]}},
        "end": "</call>",
    }
}
# What the fake worker's model says of its tokens.
VOCABULARY = TokenVocabulary(tuple(bytes([token]) if token < 256 else b"" for token in range(1000)), frozenset())


def compiled(source: GrammarSource, vocabulary: TokenVocabulary = VOCABULARY) -> bytes:
    lark = GrammarBuilder(vocabulary.special_names).compile(source)
    return GrammarArtefact.of(source, vocabulary.fingerprint, lark).to_bytes()


def request(name: str = "r", tokens: list[int] | None = None, **fields: object) -> worker_pb2.WorkerGenerateRequest:
    sampling = common_pb2.SamplingParams(seed=5, max_tokens=200)
    return worker_pb2.WorkerGenerateRequest(
        **({"request_id": name, "token_ids": tokens or [1, 2, 3], "sampling": sampling} | fields)  # type: ignore[arg-type]
    )


def grammar(**fields: object) -> common_pb2.Grammar:
    return common_pb2.Grammar(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
async def test_compiled_there_or_here_the_output_is_the_same_and_matches(lend, backend) -> None:
    worker = lend() if backend == "llguidance" else lend("--grammar-backend", backend)
    async with open_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        artefact = compiled(GrammarSource("regex", PATTERN))
        there, last = await collect(stub, request(grammar=grammar(compiled=artefact)))
        here, _ = await collect(stub, request(grammar=grammar(regex=PATTERN)))
        assert there == here
        assert re.fullmatch(PATTERN, bytes(there).decode())
        assert last.finish_reason == common_pb2.FINISH_REASON_STOP
        assert last.usage.completion_tokens == len(there)
        text, _ = await collect(stub, request(grammar=grammar(json_schema='{"enum": [{"a": [1, 2]}]}')))
        assert json.loads(bytes(text)) == {"a": [1, 2]}
        text, last = await collect(stub, request(grammar=grammar(ebnf=SUMS)))
        assert re.fullmatch(r"\d([+-]\d){3}", bytes(text).decode())
        assert last.finish_reason == common_pb2.FINISH_REASON_STOP
        text, _ = await collect(stub, request(grammar=grammar(structural_tag=json.dumps(CALL))))
        [inside] = re.fullmatch(r"<call>(.*)</call>", bytes(text).decode(), re.DOTALL).groups()
        assert json.loads(inside) in ({"x": 1}, {"x": 2})


@pytest.mark.parametrize("cut", [1, 8])
async def test_a_stream_goes_on_from_the_tokens_generated_before(lend, cut) -> None:
    async with open_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        whole, _ = await collect(stub, request(grammar=grammar(regex=PATTERN)))
        resumed = request(tokens=[1, 2, 3, *whole[:cut]], grammar=grammar(regex=PATTERN), output_tokens=cut)
        rest, last = await collect(stub, resumed)
        assert whole[:cut] + rest == whole
        assert last.finish_reason == common_pb2.FINISH_REASON_STOP
        over = request(tokens=[1, 2, 3, *whole], grammar=grammar(regex=PATTERN), output_tokens=len(whole))
        rest, last = await collect(stub, over)
        assert (rest, last.finish_reason) == ([], common_pb2.FINISH_REASON_STOP)


async def test_what_is_wrong_with_a_grammar_is_named_and_the_worker_goes_on(lend) -> None:
    artefact = compiled(GrammarSource("regex", PATTERN))
    foreign = compiled(GrammarSource("regex", PATTERN), TokenVocabulary((b"a",), frozenset()))
    cases = [
        (request(grammar=grammar()), "grammar"),
        (request(grammar=grammar(regex="(")), "grammar.regex"),
        (request(grammar=grammar(json_schema='{"$ref": "#"}')), "grammar.json_schema"),
        (request(grammar=grammar(compiled=artefact[:-1])), "grammar.compiled"),
        (request(grammar=grammar(compiled=foreign)), "grammar.compiled"),
        (request(grammar=grammar(compiled=artefact, options=common_pb2.GrammarOptions())), "grammar.options"),
        (request(output_tokens=4), "output_tokens"),
        (request(grammar=grammar(compiled=artefact), output_tokens=4), "output_tokens"),
        (request(grammar=grammar(compiled=artefact), output_tokens=2), "output_tokens"),
        (
            request(grammar=grammar(compiled=artefact), sampling=common_pb2.SamplingParams(ignore_eos=True)),
            "sampling.ignore_eos",
        ),
        (
            request(grammar=grammar(compiled=artefact), sampling=common_pb2.SamplingParams(min_tokens=1)),
            "sampling.min_tokens",
        ),
    ]
    async with open_channel(lend().address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for message, field in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub, message)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, field
            assert from_rpc_error(caught.value).field == field
        tokens, _ = await collect(stub, request(grammar=grammar(compiled=artefact)))
        assert re.fullmatch(PATTERN, bytes(tokens).decode())


async def test_a_worker_without_structured_output_says_so(lend) -> None:
    async with open_channel(lend("--no-structured-output").address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request(grammar=grammar(regex=PATTERN)))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert (await collect(stub, request()))[0]


async def test_a_source_that_takes_too_long_ends_at_the_deadline(lend) -> None:
    hostile = "|".join(str(number * 7919) for number in range(100_000))
    async with open_channel(lend("--grammar-timeout", "0.05").address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request(grammar=grammar(regex=hostile)))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert from_rpc_error(caught.value).field == "grammar.regex"
