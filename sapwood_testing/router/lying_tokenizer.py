"""A tokenizer that answers what no tokenizer should: wrong counts, ids of no token, answers to other requests, no end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from sapwood.v1 import common_pb2, tokenizer_pb2
from sapwood_testing.router.fake_tokenizer import FakeTokenizer

Context = grpc.aio.ServicerContext[Any, Any]

LARGEST = 2**32 - 1
NASTY = "\x1b[31m\nFORGED line\r\x00\u202e" + "x" * 100_000
LIES = {
    "sequences": ("none", "two", "empty", "beyond", "largest", "many"),
    "chat": ("none", "beyond", "largest", "many", "nasty text"),
    "grammar": ("none", "nasty parser", "nasty left out", "many left out"),
    "vocabulary": (
        *("no size", "largest size", "no end", "short tokens", "long lengths", "no lengths", "nameless", "many names"),
        *("special beyond", "no text", "other fingerprint", "larger and larger"),
    ),
    "info": (
        *("no size", "largest size", "no fingerprint", "largest without fingerprint", "nasty parsers", "nasty prompts"),
        *("pair beyond", "short texts", "many variables", "nothing"),
    ),
    "items": (
        *("of nobody", "twice", "swapped", "no outcome", "other outcome", "no end", "silent", "cut", "unknown code"),
        *("nasty error", "late for ever"),
    ),
}
"""What it may lie about, and how."""


class LyingTokenizer(FakeTokenizer):
    """Answers as the fake does but for one lie."""

    def __init__(self) -> None:
        super().__init__()
        self.lie = ("", "")
        """What it lies about, and how: of :data:`LIES`."""

    def _how(self, what: str) -> str:
        return self.lie[1] if self.lie[0] == what else ""

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        answer = await super().Tokenize(request, context)
        match self._how("sequences"):
            case "none":
                del answer.sequences[:]
            case "two":
                answer.sequences.add(ids=[5, 6])
            case how if how:
                for sequence in answer.sequences:
                    _falsify(sequence, how)
        return answer

    async def ApplyChatTemplate(  # noqa: N802
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        answer = await super().ApplyChatTemplate(request, context)
        match self._how("chat"):
            case "none":
                answer.ClearField("tokens")
            case "nasty text":
                answer.text = NASTY
            case how if how:
                _falsify(answer.tokens, how)
        return answer

    async def CompileGrammar(  # noqa: N802
        self, request: tokenizer_pb2.CompileGrammarRequest, context: Context
    ) -> tokenizer_pb2.CompileGrammarResponse:
        answer = await super().CompileGrammar(request, context)
        match self._how("grammar"):
            case "none":
                answer.Clear()
            case "nasty parser":
                answer.tool_parser = NASTY
            case "nasty left out":
                answer.left_out.append(NASTY)
            case "many left out":
                answer.left_out.extend(f"keyword{n}" for n in range(20_000))
        return answer

    async def GetVocabulary(  # noqa: N802
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Context
    ) -> tokenizer_pb2.GetVocabularyResponse:
        answer = await super().GetVocabulary(request, context)
        match self._how("vocabulary"):
            case "no size":
                answer.size = 0
            case "largest size":
                answer.size = LARGEST
            case "no end":
                answer.size = LARGEST
                del answer.lengths[:]
                answer.lengths.extend([1] * 100_000)
                answer.tokens = b"a" * 100_000
            case "larger and larger":
                answer.size = request.first + 1_000
                answer.lengths.extend([1] * 300)
                answer.tokens += b"a" * 300
            case "short tokens":
                answer.tokens = answer.tokens[:10]
            case "long lengths":
                answer.lengths[0] = LARGEST
            case "no lengths":
                del answer.lengths[:]
            case "nameless":
                del answer.special_names[1:]
            case "many names":
                answer.special_names.extend([b"<a>"] * 9)
            case "special beyond":
                answer.special.append(LARGEST)
                answer.special_names.append(b"\xff\xfe")
            case "no text":
                answer.tokens = b"\xff" * len(answer.tokens)
            case "other fingerprint":
                answer.fingerprint = b"%d" % self.vocabularies
        return answer

    async def GetTokenBytes(  # noqa: N802
        self, request: tokenizer_pb2.GetTokenBytesRequest, context: Context
    ) -> tokenizer_pb2.GetTokenBytesResponse:
        """The answer for a token that does not exist, from a tokenizer too old to give its vocabulary."""
        return tokenizer_pb2.GetTokenBytesResponse(tokens=[b"a"], special=[LARGEST])

    async def GetInfo(  # noqa: N802
        self, request: tokenizer_pb2.GetInfoRequest, context: Context
    ) -> tokenizer_pb2.GetInfoResponse:
        answer = await super().GetInfo(request, context)
        match self._how("info"):
            case "no size":
                answer.vocab_size = 0
            case "largest size":
                answer.vocab_size = LARGEST
            case "no fingerprint":
                answer.vocabulary_fingerprint = b""
            case "largest without fingerprint":
                answer.vocab_size, answer.vocabulary_fingerprint = LARGEST, b""
            case "nasty parsers":
                answer.tool_parser = answer.reasoning_parser = NASTY
            case "nasty prompts":
                answer.prompts.update({NASTY: NASTY})
                answer.default_prompt_name = "missing"
            case "pair beyond":
                answer.pair.before.extend([LARGEST] * 100_000)
            case "short texts":
                answer.max_text_bytes = 1
            case "many variables":
                answer.template_variables.extend(f"v{n}" for n in range(100_000))
            case "nothing":
                answer.Clear()
        return answer

    async def Encode(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.EncodeResponse]:
        waiting: list[tokenizer_pb2.EncodeResult] = []
        async for answer in super().Encode(request_iterator, context):
            results = answer.results
            match self._how("items"):
                case "of nobody":
                    results.extend(tokenizer_pb2.EncodeResult(id=LARGEST - n) for n in range(1_000))
                case "twice":
                    results.extend([*results])
                case "swapped" if results:
                    waiting.extend(results)
                    if len(waiting) < 2:
                        continue
                    waiting[0].id, waiting[1].id = waiting[1].id, waiting[0].id
                    del results[:]
                    results.extend(waiting)
                    waiting.clear()
                case "no outcome":
                    for result in results:
                        result.CopyFrom(tokenizer_pb2.EncodeResult(id=result.id))
                case "other outcome":
                    for result in results:
                        ids = common_pb2.TokenIds(ids=[5])
                        if result.HasField("tokenize"):
                            result.apply_chat_template.tokens.CopyFrom(ids)
                        else:
                            result.tokenize.sequences.append(ids)
                case "no end" if results:
                    for _ in range(2_000):
                        yield tokenizer_pb2.EncodeResponse()
                    del results[:]
                case "silent" | "late for ever" if results:
                    del results[:]
                case "cut" if results:
                    return
                case "unknown code":
                    for result in results:
                        result.error.code = -5
                case "nasty error":
                    for result in results:
                        result.error.code, result.error.message = 3, NASTY
                        result.error.field, result.error.reason = NASTY, NASTY
                        result.error.retry_after_ms = LARGEST
            yield answer
            if self._how("items") == "late for ever":
                await asyncio.sleep(0.01)


def _falsify(sequence: common_pb2.TokenIds, how: str) -> None:
    match how:
        case "empty":
            del sequence.ids[:]
        case "beyond":
            sequence.ids.append(100_000)
        case "largest":
            sequence.ids.append(LARGEST)
        case "many":
            sequence.ids.extend([5] * 2_000_000)
