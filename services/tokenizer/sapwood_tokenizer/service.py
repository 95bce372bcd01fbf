"""The tokenizer's gRPC front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.chat_template import ChatTemplate
from sapwood_tokenizer.convert import add_offsets, to_cache_stats, to_encode_options, to_messages
from sapwood_tokenizer.detokenize_call import DetokenizeCall
from sapwood_tokenizer.detokenizer import Detokenizer
from sapwood_tokenizer.encoder import EncodeOptions, Encoder
from sapwood_tokenizer.loader import LoadedTokenizer
from sapwood_tokenizer.output_parser import OutputParser
from sapwood_tokenizer.output_stream import OutputStream, StreamOptions
from sapwood_tokenizer.parser_defaults import ParserDefaults
from sapwood_tokenizer.reasoning_parser import registry as reasoning_parsers
from sapwood_tokenizer.token_bytes import TokenBytes
from sapwood_tokenizer.tool_parser import registry as tool_parsers
from sapwood_tokenizer.tool_parser.tools import load_tools

SERVICE = "sapwood.v1.Tokenizer"
DETOKENIZE = f"/{SERVICE}/Detokenize"

Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerService(tokenizer_pb2_grpc.TokenizerServicer):
    """Implements ``sapwood.v1.Tokenizer``; see the proto for what each method does.

    Args:
        loaded: The tokenizer.
        model: The name clients use.
        parsers: The parsers that fit the model.
        encoder: Encodes texts.
        draining: Set when the service is about to stop.
    """

    def __init__(
        self,
        loaded: LoadedTokenizer,
        model: str,
        parsers: ParserDefaults,
        encoder: Encoder,
        draining: asyncio.Event,
    ) -> None:
        self._loaded = loaded
        self._model = model
        self._parsers = parsers
        self._draining = draining
        self._encoder = encoder
        self._table = TokenBytes(loaded.tokenizer)
        self._template = (
            ChatTemplate(loaded.chat_template, loaded.special_tokens) if loaded.chat_template is not None else None
        )
        self._open_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    async def drained(self) -> None:
        """Returns once no Detokenize stream is open."""
        await self._no_streams.wait()

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Encodes a batch of texts."""
        encoded = await self._encoder.encode(request.texts, to_encode_options(request))
        response = tokenizer_pb2.TokenizeResponse()
        for sequence in encoded:
            response.sequences.add(ids=sequence.ids)
            if sequence.offsets is not None:
                add_offsets(response, sequence.offsets)
        return response

    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Renders and encodes a conversation."""
        if not request.messages:
            raise InvalidArgumentError("messages is empty", field="messages")
        if self._template is None:
            raise InvalidArgumentError(
                "the model has no chat template; start the tokenizer with --chat-template FILE", field="messages"
            )
        continued = request.continue_final_message
        prompted = request.add_generation_prompt if request.HasField("add_generation_prompt") else not continued
        if continued and prompted:
            raise InvalidArgumentError(
                "a message that is continued is not followed by a generation prompt", field="continue_final_message"
            )
        text = self._template.render(
            to_messages(request.messages),
            add_generation_prompt=prompted,
            tools=load_tools(request.tools),
            continue_final_message=continued,
        )
        # The template writes the special tokens itself.
        (encoded,) = await self._encoder.encode([text], EncodeOptions(add_special_tokens=False), field="messages")
        response = tokenizer_pb2.ApplyChatTemplateResponse(text=text)
        response.tokens.ids.extend(encoded.ids)
        reasoning_open = reasoning_parsers.ends_in_reasoning(text, request.messages[-1].content if continued else "")
        if reasoning_open is not None:
            response.reasoning_open = reasoning_open
        return response

    async def Detokenize(
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.DetokenizeResponse]:
        """Decodes the streams of one call; all outputs of one message go out as one."""
        call = DetokenizeCall(self._open_stream, self._loaded.vocab_size, self._count)
        requests = aiter(request_iterator)
        draining = asyncio.ensure_future(self._draining.wait())
        upcoming: asyncio.Future[tokenizer_pb2.DetokenizeRequest] | None = None
        try:
            while not (draining.done() and call.idle):
                upcoming = upcoming or asyncio.ensure_future(anext(requests))
                waited: set[asyncio.Future[Any]] = {upcoming} if draining.done() else {upcoming, draining}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not upcoming.done():
                    continue
                try:
                    request = upcoming.result()
                except StopAsyncIteration:
                    return
                upcoming = None
                outputs = call.process(request.inputs)
                if outputs:
                    yield tokenizer_pb2.DetokenizeResponse(outputs=outputs)
        finally:
            call.close()
            draining.cancel()
            if upcoming is not None:
                upcoming.cancel()

    async def GetInfo(self, request: tokenizer_pb2.GetInfoRequest, context: Context) -> tokenizer_pb2.GetInfoResponse:
        """Describes the tokenizer."""
        loaded = self._loaded
        return tokenizer_pb2.GetInfoResponse(
            model=self._model,
            vocab_size=loaded.vocab_size,
            bos_token_id=loaded.bos_token_id,
            eos_token_ids=loaded.eos_token_ids,
            has_chat_template=self._template is not None,
            tool_parsers=tool_parsers.NAMES,
            reasoning_parsers=reasoning_parsers.NAMES,
            tool_parser=self._parsers.tool_parser,
            reasoning_parser=self._parsers.reasoning_parser,
            exact_cache=to_cache_stats(self._encoder.exact_cache),
            prefix_cache=to_cache_stats(self._encoder.prefix_cache),
        )

    def _open_stream(self, options: StreamOptions) -> OutputStream:
        parser = OutputParser(options.parsers)
        skipped = frozenset[int]()
        if options.skip_special_tokens:
            needed = map(self._loaded.tokenizer.token_to_id, parser.special_tokens)
            skipped = self._loaded.special_ids.difference(index for index in needed if index is not None)
        return OutputStream(Detokenizer(self._table, options.stop, skipped), parser)

    def _count(self, change: int) -> None:
        self._open_streams += change
        if self._open_streams:
            self._no_streams.clear()
        else:
            self._no_streams.set()
