"""CompileGrammar over gRPC, against the service in its own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from sapwood.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.grammar.artefact import GrammarArtefact
from sapwood_common.network.channel import open_channel
from sapwood_common.status import from_rpc_error

# A fast machine compiles it in 0.3 s, six times the deadlines below.
HOSTILE = "|".join(str(number * 7919) for number in range(100_000))
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def ask(cache_salt: str = "", **fields: object) -> tokenizer_pb2.CompileGrammarRequest:
    grammar = common_pb2.Grammar(**fields)  # type: ignore[arg-type]
    return tokenizer_pb2.CompileGrammarRequest(grammar=grammar, cache_salt=cache_salt)


async def refusal(call) -> tuple[grpc.StatusCode, str | None, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    return caught.value.code(), error.field, error.message


async def test_each_kind_is_compiled_once_and_equal_ones_have_one_key(start_service: Callable) -> None:
    async with open_channel(start_service().address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        requests = [
            ask(json_schema='{"type": "integer"}'),
            ask(
                json_schema='{"type": "integer"}', options=common_pb2.GrammarOptions(any_whitespace=False, lenient=True)
            ),
            ask(regex="[a-z]+"),
            ask(ebnf='root ::= "a" | "b"'),
            ask(structural_tag='{"format": {"type": "const_string", "value": "<|im_start|>x"}}'),
        ]
        first = [await stub.CompileGrammar(request) for request in requests]
        again = [await stub.CompileGrammar(request) for request in requests]
        assert [answer.cached for answer in first] == [False] * 5
        assert [answer.cached for answer in again] == [True] * 5
        assert [answer.compiled for answer in first] == [answer.compiled for answer in again]
        assert len({answer.key for answer in first}) == 5
        artefacts = [GrammarArtefact.from_bytes(answer.compiled) for answer in first]
        assert [artefact.key for artefact in artefacts] == [answer.key for answer in first]
        assert len({artefact.fingerprint for artefact in artefacts}) == 1
        assert '<|im_start|> "x"' in artefacts[-1].lark


async def test_what_one_salt_compiled_is_not_found_under_another(start_service: Callable) -> None:
    async with open_channel(start_service().address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        keys = set()
        for salt in ("", "alice", "bob"):
            answers = [await stub.CompileGrammar(ask(regex="[a-z]+", cache_salt=salt)) for _ in range(2)]
            assert [answer.cached for answer in answers] == [False, True]
            keys |= {answer.key for answer in answers}
        assert len(keys) == 3, "workers keep what they make of a grammar by its key"
        for call in (
            stub.CompileGrammar(ask(regex="a", cache_salt="s" * 257)),
            stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["a"], cache_salt="s" * 257)),
        ):
            assert (await refusal(call))[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "cache_salt")


async def test_what_is_wrong_is_named(start_service: Callable) -> None:
    async with open_channel(start_service("--grammar-max-bytes", "1000").address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        for request, field, text in [
            (ask(), "grammar", "empty"),
            (ask(compiled=b"x"), "grammar.compiled", "compiled already"),
            (ask(regex="("), "grammar.regex", "unclosed"),
            (ask(json_schema='{"uniqueItems": true, "type": "array"}'), "grammar.json_schema", "uniqueItems"),
            (ask(json_schema='{"$ref": "#"}'), "grammar.json_schema", "no end"),
            (ask(ebnf="x"), "grammar.ebnf", "::="),
            (ask(structural_tag="{}"), "grammar.structural_tag", "format"),
            (ask(regex="a" * 1001), "grammar.regex", "at most 1000"),
        ]:
            code, named, message = await refusal(stub.CompileGrammar(request))
            assert (code, named) == (INVALID, field)
            assert text in message


async def test_a_schema_of_50_mb_is_refused_and_others_are_answered_meanwhile(common_service: Any) -> None:
    async with open_channel(common_service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        large = json.dumps({"enum": ["x" * (50 << 20)]})
        refused = asyncio.ensure_future(refusal(stub.CompileGrammar(ask(json_schema=large))))
        assert (await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["hello"]))).sequences
        code, field, message = await refused
        assert (code, field) == (INVALID, "grammar.json_schema")
        assert "at most 1048576" in message


async def test_a_catastrophic_grammar_ends_at_the_services_deadline_and_nobody_else_waits(
    start_service: Callable,
) -> None:
    service = start_service("--grammar-timeout", "0.05", "--grammar-processes", "2")
    async with open_channel(service.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        hostile = asyncio.ensure_future(refusal(stub.CompileGrammar(ask(regex=HOSTILE))))
        answered = 0
        while not hostile.done():
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest(texts=["hello"]))
            answered += 1
        code, field, message = await hostile
        assert (code, field) == (grpc.StatusCode.DEADLINE_EXCEEDED, "grammar.regex")
        assert "too complex" in message
        assert answered


async def test_the_callers_deadline_and_cancellation_hold(start_service: Callable) -> None:
    async with open_channel(start_service("--grammar-processes", "1").address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        code, _, _ = await refusal(stub.CompileGrammar(ask(regex=HOSTILE), timeout=0.05))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        call = stub.CompileGrammar(ask(regex=HOSTILE + "|x"))
        await asyncio.sleep(0.1)
        call.cancel()
        # The only process is free again at once: what it was at has been killed.
        assert (await stub.CompileGrammar(ask(regex="a+"))).compiled


async def test_tools_of_more_than_a_grammar_may_have_are_refused_unread(start_service: Callable) -> None:
    """Read, and made a grammar of, they kept the service from all else for 0.7 s before it refused them."""
    tool = {"type": "function", "function": {"name": "f", "description": "a" * 2_000_000}}
    calls = tokenizer_pb2.ToolCallGrammar(tools=json.dumps([tool]), required=True, tool_parser="hermes")
    async with open_channel(start_service().address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        code, field, message = await refusal(stub.CompileGrammar(tokenizer_pb2.CompileGrammarRequest(tool_calls=calls)))
        assert (code, field) == (INVALID, "tool_calls.tools")
        assert "at most 1048576 are compiled" in message
        calls.tools = json.dumps([{**tool, "function": {"name": "f", "description": "a" * 100_000}}])
        made = await stub.CompileGrammar(tokenizer_pb2.CompileGrammarRequest(tool_calls=calls))
        assert made.compiled
