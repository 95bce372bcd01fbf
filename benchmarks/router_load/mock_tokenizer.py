"""A tokenizer service that costs next to nothing: four bytes of text are a token, every token is a word.

What a real one costs is measured elsewhere (``bench_tokenizer.py``); here it would only hide what the router costs.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from router_load.mock_engine import WORD
from router_load.mock_worker import CHARACTERS_A_TOKEN, WORD_TOKEN

from sapwood.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.serving.server import ServiceServer, serve_until_stopped
from sapwood_tokenizer.serve.convert import add_tokens

_NAME = "sapwood.v1.Tokenizer"
_SESSIONS = frozenset({f"/{_NAME}/Detokenize", f"/{_NAME}/Encode"})
_MOST_BYTES = 8 * 1024 * 1024
"""The default of the real tokenizer."""
_WORDS = WORD_TOKEN + 1
"""Tokens of the vocabulary for answers; those of prompts are not decoded."""
Context = grpc.aio.ServicerContext[Any, Any]


def encode(text: str) -> array[int]:
    """Its tokens."""
    raw = text.encode()
    return array("I", raw + b" " * (-len(raw) % CHARACTERS_A_TOKEN))


async def tokenize(request: tokenizer_pb2.TokenizeRequest) -> tokenizer_pb2.TokenizeResponse:
    """Its texts' tokens.

    Raises:
        InvalidArgumentError: A text has more than are asked for.
    """
    encoded = [encode(text) for text in request.texts]
    if request.HasField("max_tokens") and max(map(len, encoded)) > request.max_tokens:
        raise InvalidArgumentError(f"a text is longer than the limit of {request.max_tokens} tokens", field="texts[0]")
    response = tokenizer_pb2.TokenizeResponse()
    for ids in encoded:
        await add_tokens(response.sequences.add().ids, ids)
    return response


def apply_chat_template(
    request: tokenizer_pb2.ApplyChatTemplateRequest,
) -> tokenizer_pb2.ApplyChatTemplateResponse:
    """The tokens of what its messages say."""
    text = "".join(message.content for message in request.messages)
    return tokenizer_pb2.ApplyChatTemplateResponse(text=text, tokens=common_pb2.TokenIds(ids=encode(text)))


class MockTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    async def Tokenize(  # noqa: N802
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        return await tokenize(request)

    async def GetInfo(  # noqa: N802
        self, request: tokenizer_pb2.GetInfoRequest, context: Context
    ) -> tokenizer_pb2.GetInfoResponse:
        return tokenizer_pb2.GetInfoResponse(
            model="mock",
            vocab_size=2**32 - 1,
            has_chat_template=True,
            max_text_bytes=_MOST_BYTES,
            vocabulary_fingerprint=b"words",
        )

    async def GetVocabulary(  # noqa: N802
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Context
    ) -> tokenizer_pb2.GetVocabularyResponse:
        return tokenizer_pb2.GetVocabularyResponse(
            fingerprint=b"words", size=_WORDS, tokens=WORD.encode() * _WORDS, lengths=[len(WORD)] * _WORDS
        )

    async def ApplyChatTemplate(  # noqa: N802
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        return apply_chat_template(request)

    async def CompileGrammar(  # noqa: N802
        self, request: tokenizer_pb2.CompileGrammarRequest, context: Context
    ) -> tokenizer_pb2.CompileGrammarResponse:
        kind = request.grammar.WhichOneof("grammar")
        source = "" if kind is None else getattr(request.grammar, kind)
        return tokenizer_pb2.CompileGrammarResponse(compiled=source.encode())  # about as long as what a real one makes

    async def Encode(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.EncodeResponse]:
        yield tokenizer_pb2.EncodeResponse()
        async for request in request_iterator:
            response = tokenizer_pb2.EncodeResponse()
            for item in request.items:
                if item.HasField("tokenize"):
                    response.results.add(id=item.id, tokenize=await tokenize(item.tokenize))
                elif item.HasField("apply_chat_template"):
                    answer = apply_chat_template(item.apply_chat_template)
                    response.results.add(id=item.id, apply_chat_template=answer)
            yield response

    async def Detokenize(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.DetokenizeResponse]:
        read: dict[int, int] = {}
        async for request in request_iterator:
            response = tokenizer_pb2.DetokenizeResponse()
            for item in request.inputs:
                count = read.pop(item.stream_id, 0) + len(item.token_ids)
                if item.cancel:
                    continue
                if not item.end:
                    read[item.stream_id] = count
                text = WORD * len(item.token_ids)
                response.outputs.add(stream_id=item.stream_id, text=text, ended=item.end, tokens_consumed=count)
            if response.outputs:
                yield response


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    server = ServiceServer("127.0.0.1", parser.parse_args().port, [_NAME], uncounted=_SESSIONS)
    tokenizer_pb2_grpc.add_TokenizerServicer_to_server(MockTokenizer(), server.grpc)
    await server.start()
    await server.set_serving(True)
    await serve_until_stopped(server, drain_timeout=0.1)


if __name__ == "__main__":
    uvloop.run(main())
