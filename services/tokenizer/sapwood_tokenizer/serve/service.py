"""The tokenizer's gRPC front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from sapwood.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.errors import InvalidArgumentError, PromptTooLongError, UnimplementedError
from sapwood_common.serving.rpc_telemetry import RpcTelemetry
from sapwood_common.settings.flags import service_flag
from sapwood_text.parsed_stream import ParsedStream, StreamOptions, open_stream
from sapwood_text.reasoning_parser import registry as reasoning_parsers
from sapwood_text.tool_parser import registry as tool_parsers
from sapwood_text.vocabulary import Vocabulary
from sapwood_tokenizer.encode.encoder import EncodeOptions, Encoder
from sapwood_tokenizer.encode.pair_template import PairTemplate
from sapwood_tokenizer.pictures.families.family import Prepared
from sapwood_tokenizer.pictures.preparer import Preparer, Source
from sapwood_tokenizer.serve.compile_grammar import Grammars
from sapwood_tokenizer.serve.convert import (
    add_offsets,
    add_tokens,
    checked_salt,
    fingerprint_of,
    to_cache_stats,
    to_encode_options,
    to_pair_template,
    vocabulary_part,
)
from sapwood_tokenizer.serve.detokenize_call import DetokenizeCall
from sapwood_tokenizer.serve.encode_call import EncodeCall
from sapwood_tokenizer.serve.open_streams import OpenStreams
from sapwood_tokenizer.serve.picture_parts import add_pictures, sources_of, sources_of_text, without_pictures
from sapwood_tokenizer.serve.renderer import Renderer
from sapwood_tokenizer.template.parser_defaults import ParserDefaults
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

logger = logging.getLogger(__name__)

SERVICE = "sapwood.v1.Tokenizer"
DETOKENIZE = f"/{SERVICE}/Detokenize"

Context = grpc.aio.ServicerContext[Any, Any]

_MOST_TEXTS = 16384
_MOST_TOKENS = 65536
_MOST_OPTION_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may ask for.

    Attributes:
        max_text_bytes: The longest text that is encoded, and the longest conversation that is rendered.
        max_open_streams: Detokenize streams open at a time, in all calls together.
    """

    max_text_bytes: int
    max_open_streams: int


class TokenizerService(tokenizer_pb2_grpc.TokenizerServicer):
    """Implements ``sapwood.v1.Tokenizer``; the proto says what each method does.

    Args:
        loaded: The tokenizer.
        vocabulary: The tokens, for decoding answers; None: the model gives no answers.
        model: The name clients use.
        parsers: The parsers that fit the model.
        encoder: Encodes texts.
        renderer: Renders conversations; None: the model has no chat template.
        pair: How the tokenizer joins two texts; None: it does not.
        preparer: Prepares pictures; None: the model takes none.
        limits: What clients may ask for.
        draining: Set when the service is about to stop.
        grammars: Compiles grammars.
        telemetry: Measures the items of Encode calls.
    """

    def __init__(
        self,
        loaded: LoadedTokenizer,
        vocabulary: Vocabulary | None,
        model: str,
        parsers: ParserDefaults,
        encoder: Encoder,
        renderer: Renderer | None,
        pair: PairTemplate | None,
        preparer: Preparer | None,
        limits: Limits,
        draining: asyncio.Event,
        grammars: Grammars,
        telemetry: RpcTelemetry,
    ) -> None:
        self._loaded = loaded
        self._model = model
        self._parsers = parsers
        self._tool_parsers = tool_parsers.names()  # which looks at all installed packages
        self._draining = draining
        self._grammars = grammars
        self._telemetry = telemetry
        self._limits = limits
        self._encoder = encoder
        self._renderer = renderer
        self._vocabulary = vocabulary
        self._pair = pair
        self._preparer = preparer
        self._warned_of_tools = False
        self._fingerprint = b"" if vocabulary is None else fingerprint_of(vocabulary, grammars.fingerprint)
        self._open_streams = OpenStreams(limits.max_open_streams, _MOST_OPTION_BYTES)

    @property
    def open_streams(self) -> int:
        """How many Detokenize streams are open."""
        return self._open_streams.count

    async def drained(self) -> None:
        """Returns once no Detokenize stream is open."""
        await self._open_streams.wait_until_none()

    def close(self) -> None:
        """Ends the threads. No call may be running."""
        self._encoder.close()

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        return await self._tokenize(request)

    async def ApplyChatTemplate(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        return await self._apply_chat_template(request)

    def Encode(
        self, request_iterator: AsyncIterator[tokenizer_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.EncodeResponse]:
        """Answers many requests, each like one to Tokenize or ApplyChatTemplate, over one call."""
        call = EncodeCall(self._tokenize, self._apply_chat_template, self._telemetry, self._draining)
        return call.answer(request_iterator)

    async def _tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> tokenizer_pb2.TokenizeResponse:
        if len(request.texts) > _MOST_TEXTS:
            raise InvalidArgumentError(f"more than {_MOST_TEXTS} texts in one request", field="texts")
        options = to_encode_options(request)
        async with self._pictures(sources_of_text(request), options.salt) as pictures:
            texts: Sequence[str] = request.texts
            if self._preparer is not None and pictures:
                texts = [self._preparer.expand(texts[0], pictures, field="texts[0]")]
            encoded = await self._encoder.encode(texts, options)
            fill = self._encoder.fill_in_middle if request.suffix else None
            response = tokenizer_pb2.TokenizeResponse(end_token_ids=() if fill is None else fill.end_token_ids)
            for sequence in encoded:
                await add_tokens(response.sequences.add().ids, sequence.ids)
                if sequence.offsets is not None:
                    add_offsets(response, sequence.offsets)
            if self._preparer is not None and pictures:
                placed = self._preparer.place(encoded[0].ids, pictures, options.salt, field="texts[0]")
                add_pictures(response, placed)
        return response

    async def _apply_chat_template(
        self, request: tokenizer_pb2.ApplyChatTemplateRequest
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        if not request.messages:
            raise InvalidArgumentError("messages is empty", field="messages")
        salt = checked_salt(request.cache_salt)
        if self._renderer is None:
            raise InvalidArgumentError(
                f"the model has no chat template; {service_flag('tokenizer', 'chat-template')} names a file with one",
                field="messages",
            )
        if request.tools and not self._renderer.shows_tools and not self._warned_of_tools:
            self._warned_of_tools = True
            logger.warning(
                "a request offers tools, but the chat template does not show them: the model does not see any"
            )
        continued = request.continue_final_message
        prompted = request.add_generation_prompt if request.HasField("add_generation_prompt") else not continued
        if continued and prompted:
            raise InvalidArgumentError(
                "a message that is continued is not followed by a generation prompt", field="continue_final_message"
            )
        size, most = _size_of(request), self._limits.max_text_bytes
        if size > most:
            raise PromptTooLongError.in_bytes(size, most, field="messages")
        sources = sources_of(request)
        async with self._pictures(sources, salt) as pictures:
            text = await self._renderer.render(without_pictures(request) if sources else request, prompted=prompted)
            shown = text if self._preparer is None or not pictures else self._preparer.expand(text, pictures)
            # No special tokens are added, since the template writes them.
            options = EncodeOptions(
                add_special_tokens=False,
                max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
                salt=salt,
            )
            (encoded,) = await self._encoder.encode([shown], options, field="messages")
            response = tokenizer_pb2.ApplyChatTemplateResponse(text=text)
            await add_tokens(response.tokens.ids, encoded.ids)
            if self._preparer is not None and pictures:
                add_pictures(response, self._preparer.place(encoded.ids, pictures, salt))
        reasoning_open = reasoning_parsers.ends_in_reasoning(text, request.messages[-1].content if continued else "")
        if reasoning_open is not None:
            response.reasoning_open = reasoning_open
        return response

    @contextlib.asynccontextmanager
    async def _pictures(self, sources: Sequence[Source], salt: str) -> AsyncIterator[list[Prepared]]:
        """The pictures of a request, whose bytes count until its response is made."""
        if not sources:
            yield []
            return
        if self._preparer is None:
            raise InvalidArgumentError(f"this model takes no {sources[0].what}s", field=sources[0].field)
        async with self._preparer.pictures_of(sources, salt) as pictures:
            yield pictures

    async def Detokenize(
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Context
    ) -> AsyncIterator[tokenizer_pb2.DetokenizeResponse]:
        """Decodes the streams of one call; all outputs of one message go out as one, unless they are many."""
        call = DetokenizeCall(self._open_stream, self._loaded.vocab_size, self._open_streams)
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
                for number, response in enumerate(call.process(request)):
                    if number:
                        await asyncio.sleep(0)  # lets other calls run
                    if response.outputs:
                        yield response
        finally:
            call.close()
            draining.cancel()
            if upcoming is not None:
                upcoming.cancel()

    async def CompileGrammar(
        self, request: tokenizer_pb2.CompileGrammarRequest, context: Context
    ) -> tokenizer_pb2.CompileGrammarResponse:
        """Compiles a grammar; the caller's deadline and its cancellation hold for the compilation."""
        return await self._grammars.compile(request, context.time_remaining())

    async def GetTokenBytes(
        self, request: tokenizer_pb2.GetTokenBytesRequest, context: Context
    ) -> tokenizer_pb2.GetTokenBytesResponse:
        if len(request.token_ids) > _MOST_TOKENS:
            raise InvalidArgumentError(f"more than {_MOST_TOKENS} tokens in one request", field="token_ids")
        vocabulary = self._decodable()
        return tokenizer_pb2.GetTokenBytesResponse(
            tokens=map(vocabulary.table.of, request.token_ids),
            special=sorted(vocabulary.special_ids.intersection(request.token_ids)),
        )

    async def GetVocabulary(
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Context
    ) -> tokenizer_pb2.GetVocabularyResponse:
        """A part of the vocabulary, put together in a thread: it has tens of thousands of tokens."""
        return await asyncio.to_thread(vocabulary_part, self._decodable(), self._fingerprint, request.first)

    async def GetInfo(self, request: tokenizer_pb2.GetInfoRequest, context: Context) -> tokenizer_pb2.GetInfoResponse:
        loaded = self._loaded
        return tokenizer_pb2.GetInfoResponse(
            model=self._model,
            vocab_size=loaded.vocab_size,
            bos_token_id=loaded.bos_token_id,
            eos_token_ids=loaded.eos_token_ids,
            has_chat_template=self._renderer is not None,
            tool_parsers=self._tool_parsers,
            reasoning_parsers=reasoning_parsers.NAMES,
            tool_parser=self._parsers.tool_parser,
            reasoning_parser=self._parsers.reasoning_parser,
            exact_cache=to_cache_stats(self._encoder.exact_cache),
            prefix_cache=to_cache_stats(self._encoder.prefix_cache),
            fills_in_the_middle=self._encoder.fill_in_middle is not None,
            pair=to_pair_template(self._pair),
            max_text_bytes=self._limits.max_text_bytes,
            hides_tools=self._renderer is not None and not self._renderer.shows_tools,
            template_variables=() if self._renderer is None else self._renderer.variables,
            prompts=loaded.prompts.texts,
            default_prompt_name=loaded.prompts.default,
            vocabulary_fingerprint=self._fingerprint,
            vision="" if self._preparer is None else self._preparer.name,
        )

    def _open_stream(self, options: StreamOptions) -> ParsedStream:
        return open_stream(self._decodable(), options)

    def _decodable(self) -> Vocabulary:
        if self._vocabulary is None:
            raise UnimplementedError(
                "the tokens of this model cannot be decoded one by one; the service's log says why"
            )
        return self._vocabulary


def _size_of(request: tokenizer_pb2.ApplyChatTemplateRequest) -> int:
    """Bytes of a request, without pictures, and without texts that it has twice."""
    twice = sum(len(part.encode()) for message in request.messages for part in message.parts)
    return request.ByteSize() - twice - sum(item.ByteSize() for message in request.messages for item in message.items)
