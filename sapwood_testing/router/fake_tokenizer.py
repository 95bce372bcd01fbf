"""A tokenizer without files: each UTF-8 byte is a token (its value plus 3), after a BOS; a real gRPC server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc

from sapwood.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import InvalidArgumentError, PromptTooLongError, UnimplementedError
from sapwood_common.models.prompts import Prompts
from sapwood_common.telemetry.logs import request_id_var
from sapwood_testing.router.fake_encode import encode_items
from sapwood_testing.router.fake_parser import REASONING_PARSER, TOOL_PARSER, FakeParser
from sapwood_testing.router.fake_server import FakeServer
from sapwood_text.output_parser import ParserOptions
from sapwood_tokenizer.app import StartingService

Context = grpc.aio.ServicerContext[Any, Any]

_NAME = "sapwood.v1.Tokenizer"
_SESSIONS = frozenset({f"/{_NAME}/Encode"})
_OFFSET = 3
BOS, EOS = 2, 1


def encode(text: str, offset: int = _OFFSET) -> list[int]:
    """The tokens of a text."""
    return [BOS, *(byte + offset for byte in text.encode())]


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """The service, and the parsers of its outputs.

    Args:
        offset: What a byte's token is above its value: another vocabulary.
    """

    def __init__(self, offset: int = _OFFSET) -> None:
        self._offset = offset
        self.request_ids: list[str] = []
        self.tool_parser = TOOL_PARSER
        self.reasoning_parser = REASONING_PARSER
        """What GetInfo says fits the model."""
        self.hides_tools = False
        self.prompts = Prompts()
        self.joins_pairs = True
        """Whether it says how, as older ones do not."""
        self.reasoning_open: bool | None = None
        """What ApplyChatTemplate says of each prompt."""
        self.chats: list[tokenizer_pb2.ApplyChatTemplateRequest] = []
        self.parsed: list[ParserOptions] = []
        """What each parser was made with."""
        self.grammars: list[tokenizer_pb2.CompileGrammarRequest] = []
        """What CompileGrammar was asked for."""
        self.vocabularies = 0
        """How often the vocabulary was asked for."""
        self.encode_calls = 0
        """Calls of Encode that were opened."""
        self.hold = False
        """While set, no prompt is answered."""
        self._server = FakeServer("tokenizer", _NAME, _SESSIONS)

    @property
    def port(self) -> int:
        """Where it listens, once it has been started."""
        return self._server.port

    @property
    def address(self) -> str:
        """Its host and port."""
        return self._server.address

    async def start(self) -> None:
        """Serves, on the port it had before if it was started before."""
        await self._server.start(
            lambda grpc_server: tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, grpc_server)
        )

    async def begin_to_start(self) -> None:
        """Listens as a tokenizer does that still reads its files."""
        starting: Any = StartingService()
        await self._server.start(
            lambda grpc_server: tokenizer_pb2_grpc.add_TokenizerServicer_to_server(starting, grpc_server)
        )
        await self._server.set_serving(False)

    async def kill(self) -> None:
        """Cuts every connection."""
        await self._server.kill()

    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Bytes to tokens; its vocabulary has no tokens for gaps."""
        self.request_ids.append(request_id_var.get())
        if self.hold:
            await asyncio.Event().wait()
        if request.suffix:
            raise InvalidArgumentError("no gaps", field="suffix")
        bare = request.HasField("add_special_tokens") and not request.add_special_tokens
        sequences = [common_pb2.TokenIds(ids=encode(text, self._offset)[bare:]) for text in request.texts]
        _check_size(request, max((len(sequence.ids) for sequence in sequences), default=0), "texts[0]")
        return tokenizer_pb2.TokenizeResponse(sequences=sequences)

    async def ApplyChatTemplate(  # noqa: N802
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """``<role>content`` for each turn, then ``<assistant>`` unless the last is continued; the system's must come first.

        Tools must be a JSON array, the arguments of calls JSON objects, and so the variables, which may not be named
        ``messages``; the text does not show them.
        """
        self.request_ids.append(request_id_var.get())
        self.chats.append(request)
        if request.tools and not isinstance(_from_json(request.tools), list):
            raise InvalidArgumentError("tools is a JSON array of objects", field="tools")
        variables = _from_json(request.template_variables or "{}")
        if not isinstance(variables, dict) or "messages" in variables:
            raise InvalidArgumentError("the variables are wrong", field="template_variables")
        if request.continue_final_message and request.add_generation_prompt:
            raise InvalidArgumentError("not both", field="continue_final_message")
        for index, message in enumerate(request.messages):
            if message.role == "system" and index > 0:
                raise InvalidArgumentError("system comes first", field=f"messages[{index}].role")
            for number, call in enumerate(message.tool_calls):
                if not isinstance(_from_json(call.arguments), dict):
                    field_name = f"messages[{index}].tool_calls[{number}].arguments"
                    raise InvalidArgumentError("the arguments of a call are a JSON object", field=field_name)
        text = "".join(f"<{message.role}>{message.content}" for message in request.messages)
        if not request.continue_final_message:
            text += "<assistant>"
        tokens = encode(text, self._offset)
        _check_size(request, len(tokens), "messages")
        return tokenizer_pb2.ApplyChatTemplateResponse(
            text=text, tokens=common_pb2.TokenIds(ids=tokens), reasoning_open=self.reasoning_open
        )

    def Encode(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.EncodeResponse]:
        """Both, for many requests."""
        self.encode_calls += 1
        return encode_items(self, request_iterator, context)

    async def CompileGrammar(  # noqa: N802
        self, request: tokenizer_pb2.CompileGrammarRequest, context: Context
    ) -> tokenizer_pb2.CompileGrammarResponse:
        """A name for the grammar; the fake worker keeps to none. A grammar that says "bad" is at fault;
        "uniqueItems" is not enforced."""
        self.grammars.append(request)
        kind = request.grammar.WhichOneof("grammar")
        if kind is not None and "bad" in str(request.grammar):
            raise InvalidArgumentError("it is bad", field=f"grammar.{kind}")
        if "bad" in request.tool_calls.tools:
            raise InvalidArgumentError("it is bad", field="tool_calls.tools[0].function.parameters")
        parser = (request.tool_calls.tool_parser or TOOL_PARSER) if request.HasField("tool_calls") else ""
        return tokenizer_pb2.CompileGrammarResponse(
            compiled=f"compiled {len(self.grammars)}".encode(),
            tool_parser=parser,
            left_out=["uniqueItems"] if "uniqueItems" in str(request.grammar) else [],
        )

    async def GetVocabulary(  # noqa: N802
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Context
    ) -> tokenizer_pb2.GetVocabularyResponse:
        """The bytes, behind special tokens with names, in two parts."""
        self.vocabularies += 1
        names = [f"<{token}>".encode() for token in range(self._offset)]
        tokens = [*names, *(bytes([byte]) for byte in range(256))][request.first : request.first + 200]
        return tokenizer_pb2.GetVocabularyResponse(
            fingerprint=self._fingerprint,
            size=256 + self._offset,
            tokens=b"".join(tokens),
            lengths=map(len, tokens),
            special=() if request.first else range(self._offset),
            special_names=() if request.first else names,
        )

    async def GetTokenBytes(  # noqa: N802
        self, request: tokenizer_pb2.GetTokenBytesRequest, context: Context
    ) -> tokenizer_pb2.GetTokenBytesResponse:
        """Not here: no router calls it."""
        raise UnimplementedError("the fake has no GetTokenBytes")

    async def Detokenize(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.DetokenizeResponse]:
        """Not here: no router calls it."""
        raise UnimplementedError("the fake has no Detokenize")
        yield tokenizer_pb2.DetokenizeResponse()

    def make_parser(self, options: ParserOptions) -> FakeParser:
        """The parser of an output."""
        self.parsed.append(options)
        return FakeParser(options)

    @property
    def _fingerprint(self) -> bytes:
        return b"%d" % self._offset

    async def GetInfo(  # noqa: N802
        self, request: tokenizer_pb2.GetInfoRequest, context: Context
    ) -> tokenizer_pb2.GetInfoResponse:
        """Describes itself."""
        return tokenizer_pb2.GetInfoResponse(
            model="fake",
            vocab_size=256 + self._offset,
            bos_token_id=BOS,
            eos_token_ids=[EOS],
            has_chat_template=True,
            tool_parsers=[TOOL_PARSER],
            reasoning_parsers=[REASONING_PARSER],
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            hides_tools=self.hides_tools,
            prompts=self.prompts.texts,
            default_prompt_name=self.prompts.default,
            vocabulary_fingerprint=self._fingerprint,
            pair=tokenizer_pb2.PairTemplate(before=[BOS], between=[EOS], after=[EOS]) if self.joins_pairs else None,
        )


def _check_size(
    request: tokenizer_pb2.TokenizeRequest | tokenizer_pb2.ApplyChatTemplateRequest, tokens: int, field: str
) -> None:
    if request.HasField("max_tokens") and tokens > request.max_tokens:
        raise PromptTooLongError.of(tokens, request.max_tokens, field=field)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
