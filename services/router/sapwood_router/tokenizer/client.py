"""The tokenizer service as the pipeline uses it: encode a prompt, on another replica if one is lost, or after a restart."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from sapwood.v1 import common_pb2, tokenizer_pb2
from sapwood_common.contract.pictures import PictureSpan
from sapwood_common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    PromptTooLongError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
    UnimplementedError,
)
from sapwood_common.models.prompts import NO_PROMPTS, Prompts
from sapwood_common.packed_tokens import PackedTokens
from sapwood_common.status import from_rpc_error
from sapwood_net.pacing.heavy_work import A_FEW, HeavyWork, Stint
from sapwood_net.pacing.steps import Steps, in_turns
from sapwood_router.request.arguments import whole_arguments
from sapwood_router.request.context import (
    AnswerGrammar,
    ChatPrompt,
    CompiledGrammar,
    Picture,
    PictureSource,
    RequestContext,
    TextPrompt,
    Turn,
)
from sapwood_router.request.tokens import MANY, TokenIds, gather, gather_many
from sapwood_router.tokenizer.replica import ABSENT, TokenizerReplica
from sapwood_text.vocabulary import TokenTable, Vocabulary

LARGE = 1024 * 1024
"""A request with at least this many characters of text is one of these."""
_MOST_WAITING = 2

_Waiters = deque[asyncio.Future[None]]


class LargeTexts:
    """The caller whose turn it is."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[str, _Waiters] = OrderedDict()
        """By caller, the one first whose turn is next; none of them is empty."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, caller: str, deadline: float) -> AsyncIterator[None]:
        """Waits for its turn, and has it as long as this is entered.

        Args:
            caller: Whose it is.
            deadline: On the event loop's clock.

        Raises:
            ResourceExhaustedError: Too many wait already.
            DeadlineExceededError: It does not come in time.
        """
        if self._taken:
            await self._wait(caller, deadline)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str, deadline: float) -> None:
        if self.waiting >= _MOST_WAITING:
            self._make_room(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException as error:
            if not turn.cancelled() and turn.done() and turn.exception() is None:  # its turn came as it left
                self._pass_on()
            else:
                self._forget(caller, turn)
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError("the deadline passed before it was this request's turn") from None
            raise

    def _make_room(self, caller: str) -> None:
        """Refuses the last request of who has the most waiting, or this one if that is its own caller."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        error = ResourceExhaustedError("other large requests wait", retry_after=1.0)
        if len(self._waiting[most]) <= len(self._waiting.get(caller, ())) + 1:
            raise error
        last = self._waiting[most][-1]
        self._forget(most, last)
        if not last.done():
            last.set_exception(error)

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(caller)
        if waiters is not None and turn in waiters:
            waiters.remove(turn)
            if not waiters:
                del self._waiting[caller]

    def _pass_on(self) -> None:
        while self._waiting:
            caller, waiters = self._waiting.popitem(last=False)
            turn = waiters.popleft()
            if waiters:
                self._waiting[caller] = waiters
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False


def to_grammar(grammar: AnswerGrammar) -> common_pb2.Grammar:
    """A grammar as a message."""
    options = common_pb2.GrammarOptions(any_whitespace=grammar.any_whitespace, lenient=grammar.lenient)
    kind: dict[str, Any] = {grammar.kind: grammar.text}
    return common_pb2.Grammar(options=options, **kind)


def to_compile_request(context: RequestContext) -> tokenizer_pb2.CompileGrammarRequest:
    """What the tokenizer service is asked to compile for a request whose prompt and parsers are known."""
    prompt, choice, output = context.prompt, context.tool_choice, context.output
    request = tokenizer_pb2.CompileGrammarRequest(
        reasoning_parser=output.reasoning_parser, cache_salt=context.caller.cache_salt
    )
    if output.reasoning_open is not None:
        request.reasoning_open = output.reasoning_open
    if context.grammar is not None:
        request.grammar.CopyFrom(to_grammar(context.grammar))
    if isinstance(prompt, ChatPrompt) and prompt.tools and (choice.required or output.tool_parser):
        request.tool_calls.tools = prompt.tools
        request.tool_calls.name = choice.name
        request.tool_calls.required = choice.required
        request.tool_calls.parallel = context.parallel_tool_calls and not choice.name
        request.tool_calls.tool_parser = output.tool_parser
    return request


def to_turns(turns: Sequence[Turn]) -> list[common_pb2.ChatMessage]:
    """A conversation as messages."""
    return [
        common_pb2.ChatMessage(
            role=turn.role,
            content=turn.content,
            name=turn.name,
            tool_calls=[
                common_pb2.ToolCall(id=call.id, name=call.name, arguments=whole_arguments(call.arguments))
                for call in turn.tool_calls
            ],
            tool_call_id=turn.tool_call_id,
            reasoning=turn.reasoning,
            parts=turn.parts,
            items=map(_to_item, turn.items),
        )
        for turn in turns
    ]


def _to_item(item: str | PictureSource) -> common_pb2.ContentPart:
    if isinstance(item, str):
        return common_pb2.ContentPart(text=item)
    return common_pb2.ContentPart(picture=_to_source(item))


def _to_source(picture: PictureSource) -> common_pb2.PictureSource:
    if picture.data:
        return common_pb2.PictureSource(data=picture.data, detail=picture.detail, video=picture.video)
    return common_pb2.PictureSource(url=picture.url, detail=picture.detail, video=picture.video)


def _picture_of(message: common_pb2.Picture, token_ids: Sequence[int]) -> Picture:
    offset, length = message.offset, message.length
    if not length or offset + length > len(token_ids):
        raise _wrong(f"a picture of {length} tokens at place {offset} of {len(token_ids)}")
    return Picture(
        PictureSpan(offset, length, token_ids[offset], message.digest),
        (message.tiles, message.height, message.width),
        tuple(message.layout),
        message.pixels,
    )


AnswerT = TypeVar("AnswerT")


class SharedAnswers(Generic[AnswerT]):
    """One call for all that ask the same at the same time. If one caller is cancelled, the call continues for the others."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, asyncio.Task[AnswerT]] = {}
        self._waiting: dict[Hashable, int] = {}

    async def get(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, AnswerT]]) -> AnswerT:
        """The answer for ``key``; calls ``ask`` only if no other caller waits for the same answer, and raises its errors."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.get_running_loop().create_task(ask())
            call.add_done_callback(_look_at)  # all who waited may be gone
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(call)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._calls[key]
                call.cancel()  # does nothing to one that has ended


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


MostTokens = Callable[[], int]
RequestT = TypeVar("RequestT")

_PAUSE = 0.1
_VOCABULARY_SECONDS = 60.0
"""Seconds in which the service has to give its vocabulary."""
_TOKENS_A_REQUEST = 16_384
_MOST_TOKENS = 1 << 22
"""Tokens of the largest vocabulary that is taken; the largest ones that are known have a sixteenth of it."""
_MOST_VOCABULARY_BYTES = 256 * 1024 * 1024
_TURNS_AT_ONCE = 16
"""Turns of a conversation that are written into its message in one step."""
_AT_ONCE = nullcontext()


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as tokens and pictures; ``reasoning_open`` says whether the output begins inside reasoning, None if
    unknown."""

    token_ids: TokenIds
    reasoning_open: bool | None
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class EncodedGap:
    """A prompt that asks to fill a gap; ``end_token_ids`` end the answer, beside the model's own end tokens."""

    token_ids: TokenIds
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The tokens before, between and after two texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What the service says of itself.

    Attributes:
        vocab_size: Every token id is below it.
        tool_parser, reasoning_parser: Its names of the parsers that fit the model; "" where none does.
        pair: How it joins two texts; None: it does not say.
        max_text_bytes: Bytes of the longest text or conversation that it encodes; 0: it does not say.
        hides_tools: Whether its chat template does not show tools to the model.
        template_variables: What requests may set in its chat template to an effect.
        prompts: Texts that go before those to embed.
        vocabulary_fingerprint: Equal for equal vocabularies; empty: it is too old to give its vocabulary.
    """

    vocab_size: int
    tool_parser: str
    reasoning_parser: str
    pair: PairTemplate | None
    max_text_bytes: int
    hides_tools: bool
    template_variables: frozenset[str] = frozenset()
    prompts: Prompts = NO_PROMPTS
    vocabulary_fingerprint: bytes = b""


class TokenizerClient:
    """Encodes prompts on any of the tokenizer's replicas, and knows which parsers the model's output needs.

    What asks the service raises the service's own SapwoodError; UnavailableError if it is gone; DeadlineExceededError.

    Args:
        replicas: Gives the replicas there are now, all with the same model.
        grace: Seconds that a call waits while every replica is gone, and none says that it starts.
        heavy: Where what takes long waits for its turns; None: among itself.
        absent: Whether there is to be no tokenizer: then every call raises InvalidArgumentError.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[TokenizerReplica]],
        grace: float,
        heavy: HeavyWork | None = None,
        *,
        absent: bool = False,
    ) -> None:
        self._heavy = heavy or HeavyWork()
        self._absent = absent
        self._replicas = replicas
        self._grace = grace
        self._turn = 0
        self._large = LargeTexts()
        self._info: TokenizerInfo | None = None
        self._vocabulary: tuple[bytes, Vocabulary] | None = None
        """The last one that was fetched, behind its fingerprint."""
        self._checked: TokenizerInfo | None = None
        """What the service said of itself when its vocabulary was this one."""
        self._fetching: SharedAnswers[Vocabulary] = SharedAnswers()
        self._compiling: SharedAnswers[CompiledGrammar] = SharedAnswers()

    @property
    def problem(self) -> str | None:
        """Why the service cannot be used; None while one of its replicas is well, or if there is to be none."""
        if self._absent:
            return None
        replicas = self._replicas()
        if any(replica.problem is None for replica in replicas):
            return None
        return "; ".join(f"{replica.address}: {replica.problem}" for replica in replicas) or "has no address yet"

    async def encode_text(
        self,
        text: str,
        request_id: str,
        deadline: float,
        cache_salt: str = "",
        stint: Stint | None = None,
        *,
        add_special: bool = True,
        most_tokens: MostTokens | None = None,
    ) -> TokenIds:
        """The tokens of a text.

        Args:
            text: The text.
            request_id: For the service's log.
            deadline: On the event loop's clock.
            cache_salt: The caller's salt: the service shares cached results only under the same salt.
            stint: Whose turns the pieces of long work have; None: one of its own.
            add_special: Whether the model's own special tokens are added.
            most_tokens: Says how many a long text may have; the service refuses one that has more.

        Raises:
            InvalidArgumentError: A long text has more.
            ResourceExhaustedError: Too many long texts wait.
        """
        own, large = (request_id, deadline, cache_salt), len(text) >= LARGE
        async with self._large_turn("texts", len(text), *own) if large else _AT_ONCE:
            stint = stint or self._heavy.stint(cache_salt)
            if large:
                await stint.turn()
            request = tokenizer_pb2.TokenizeRequest(texts=(text,), cache_salt=cache_salt)
            if not add_special:
                request.add_special_tokens = False
            (sequence,) = await self._tokenize(request, request_id, deadline, most_tokens if large else None)
            return await _gather(sequence.ids, stint)

    async def encode_texts(
        self,
        texts: Sequence[str],
        request_id: str,
        deadline: float,
        cache_salt: str = "",
        stint: Stint | None = None,
        *,
        bare: bool = False,
        add_special: bool = True,
        most_tokens: MostTokens | None = None,
    ) -> list[TokenIds]:
        """The tokens of several texts; arguments and errors are those of :meth:`encode_text`.

        Args:
            bare: No special tokens are added, nor read out of the text.
            add_special: Whether the model's own are added; not where ``bare``.
        """
        own, sizes = (request_id, deadline, cache_salt), [len(text) for text in texts]
        large = sum(sizes) >= LARGE
        async with self._large_turn("texts", max(sizes), *own) if large else _AT_ONCE:
            request = tokenizer_pb2.TokenizeRequest(texts=texts, cache_salt=cache_salt)
            if bare:
                request.add_special_tokens = request.parse_special_tokens = False
            elif not add_special:
                request.add_special_tokens = False
            sequences = await self._tokenize(request, request_id, deadline, most_tokens if large else None)
            return [await _gather(sequence.ids, stint or self._heavy.stint(cache_salt)) for sequence in sequences]

    async def encode_gap(
        self,
        prompt: TextPrompt,
        request_id: str,
        deadline: float,
        cache_salt: str = "",
        stint: Stint | None = None,
        *,
        most_tokens: MostTokens | None = None,
    ) -> EncodedGap:
        """The tokens of a prompt with a suffix; arguments are those of :meth:`encode_text`.

        Raises:
            InvalidArgumentError: The model fills no gaps; the field is ``suffix``.
        """
        own, size = (request_id, deadline, cache_salt), max(len(prompt.text), len(prompt.suffix))
        large = size >= LARGE
        async with self._large_turn("texts", size, *own) if large else _AT_ONCE:
            request = tokenizer_pb2.TokenizeRequest(texts=(prompt.text,), suffix=prompt.suffix, cache_salt=cache_salt)
            if large and most_tokens is not None:
                request.max_tokens = most_tokens()
            answer = await self._patiently(lambda replica: replica.tokenize(request, request_id, deadline), deadline)
            stint = stint or self._heavy.stint(cache_salt)
            return EncodedGap(
                await _gather(_sequences(answer, 1)[0].ids, stint),
                tuple(answer.end_token_ids),
            )

    async def encode_seen(
        self,
        prompt: TextPrompt,
        request_id: str,
        deadline: float,
        cache_salt: str = "",
        stint: Stint | None = None,
        *,
        most_tokens: MostTokens | None = None,
    ) -> EncodedChat:
        """The tokens of a text with pictures; arguments and errors are those of :meth:`encode_text`."""
        request = tokenizer_pb2.TokenizeRequest(
            texts=(prompt.text,),
            cache_salt=cache_salt,
            add_special_tokens=prompt.add_special,
            pictures=map(_to_source, prompt.pictures),
        )
        if most_tokens is not None:
            request.max_tokens = most_tokens()
        answer = await self._patiently(lambda replica: replica.tokenize(request, request_id, deadline), deadline)
        token_ids = await _gather(_sequences(answer, 1)[0].ids, stint or self._heavy.stint(cache_salt))
        return EncodedChat(token_ids, None, tuple(_picture_of(each, token_ids) for each in answer.pictures))

    async def encode_chat(
        self,
        prompt: ChatPrompt,
        request_id: str,
        deadline: float,
        cache_salt: str = "",
        stint: Stint | None = None,
        *,
        most_tokens: MostTokens | None = None,
    ) -> EncodedChat:
        """The tokens of a conversation, rendered with the model's template and opened for the assistant's turn; arguments and
        errors are those of :meth:`encode_text`.
        """
        size = (
            len(prompt.tools) + len(prompt.template_variables) + sum(len(turn.content or "") for turn in prompt.turns)
        )
        own, large = (request_id, deadline, cache_salt), size >= LARGE
        async with self._large_turn("messages", size, *own) if large else _AT_ONCE:
            stint = stint or self._heavy.stint(cache_salt)
            if large:
                await stint.turn()
            request = tokenizer_pb2.ApplyChatTemplateRequest(
                tools=prompt.tools,
                template_variables=prompt.template_variables,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                cache_salt=cache_salt,
            )
            if len(prompt.turns) <= A_FEW:
                request.messages.extend(to_turns(prompt.turns))
            else:
                await in_turns(_write_turns(prompt.turns, request), stint)
            if most_tokens is not None:  # a template may make a long text of a short conversation
                request.max_tokens = most_tokens()
            if large:
                await stint.turn()
            answer = await self._patiently(
                lambda replica: replica.apply_chat_template(request, request_id, deadline), deadline
            )
            reasoning_open = answer.reasoning_open if answer.HasField("reasoning_open") else None
            token_ids = await _gather(answer.tokens.ids, stint)
            pictures = tuple(_picture_of(each, token_ids) for each in answer.pictures)
            return EncodedChat(token_ids, reasoning_open, pictures)

    async def info(self, request_id: str, deadline: float) -> TokenizerInfo:
        """What it says of itself. The service is asked once, and again after :meth:`forget`."""
        if self._info is not None:
            return self._info
        request = tokenizer_pb2.GetInfoRequest()
        answer = await self._call(lambda replica: replica.stub.GetInfo, request, request_id, deadline)
        pair: PairTemplate | None = None
        if answer.HasField("pair"):
            pair = PairTemplate(tuple(answer.pair.before), tuple(answer.pair.between), tuple(answer.pair.after))
        self._info = TokenizerInfo(
            answer.vocab_size,
            answer.tool_parser,
            answer.reasoning_parser,
            pair,
            answer.max_text_bytes,
            answer.hides_tools,
            frozenset(answer.template_variables),
            Prompts(dict(answer.prompts), answer.default_prompt_name),
            answer.vocabulary_fingerprint,
        )
        return self._info

    async def compile_grammar(
        self, request: tokenizer_pb2.CompileGrammarRequest, request_id: str, deadline: float
    ) -> CompiledGrammar:
        """The grammar of an output, as workers take it. The service keeps compiled grammars.

        It is asked once for those choices of a request that ask at the same time. They have one deadline; requests that clients
        gave the same id may have others.
        """

        async def ask() -> CompiledGrammar:
            answer = await self._call(lambda replica: replica.stub.CompileGrammar, request, request_id, deadline)
            if not answer.compiled:  # a worker would take it for no grammar
                raise _wrong("a grammar of no bytes")
            return CompiledGrammar(answer.compiled, answer.tool_parser, tuple(answer.left_out))

        return await self._compiling.get((request_id, deadline, request.SerializeToString(deterministic=True)), ask)

    async def vocabulary(self, request_id: str, deadline: float) -> Vocabulary:
        """The model's tokens. The service is asked once; after :meth:`forget` it is asked whether they are still the same."""
        if self._vocabulary is not None and self._info is not None and self._checked is self._info:
            return self._vocabulary[1]
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fetching.get((), lambda: self._fetch(request_id))
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before the tokenizer gave its vocabulary") from None

    async def prefetch(self) -> None:
        """Fetches the vocabulary if there is one, so that no request waits for it."""
        with suppress(SapwoodError):
            await self.vocabulary("-", asyncio.get_running_loop().time() + _VOCABULARY_SECONDS)

    async def _fetch(self, request_id: str) -> Vocabulary:
        deadline = asyncio.get_running_loop().time() + _VOCABULARY_SECONDS
        while True:
            info = await self.info(request_id, deadline)
            fingerprint = info.vocabulary_fingerprint
            if self._vocabulary is None or not fingerprint or self._vocabulary[0] != fingerprint:
                vocabulary = await self._read(info, request_id, deadline)
                if vocabulary is None:  # the service was replaced meanwhile, or a replica is of another model
                    self.forget()
                    await asyncio.sleep(_PAUSE)
                    continue
                self._vocabulary = fingerprint, vocabulary
            self._checked = info
            return self._vocabulary[1]

    async def _read(self, info: TokenizerInfo, request_id: str, deadline: float) -> Vocabulary | None:
        """The vocabulary; None if the service has another than it said."""
        if info.vocabulary_fingerprint:
            with suppress(UnimplementedError):  # the replica that was asked is older than the one that said what it is
                return await self._fetch_parts(info.vocabulary_fingerprint, request_id, deadline)
        return await self._ask_for_each(info.vocab_size, request_id, deadline)

    async def _ask_for_each(self, size: int, request_id: str, deadline: float) -> Vocabulary:
        """The vocabulary of a service that is too old to give it: the bytes of each token, and what becomes of a first space."""
        if not 0 < size <= _MOST_TOKENS:
            raise _wrong(f"a vocabulary of {size} tokens")
        spelled: list[bytes] = []
        special: dict[int, str] = {}
        for first in range(0, size, _TOKENS_A_REQUEST):
            request = tokenizer_pb2.GetTokenBytesRequest(token_ids=range(first, min(first + _TOKENS_A_REQUEST, size)))
            answer = await self._call(lambda replica: replica.stub.GetTokenBytes, request, request_id, deadline)
            if len(answer.tokens) != len(request.token_ids) or not all(0 <= token < size for token in answer.special):
                raise _wrong("other tokens than it was asked for")
            spelled += answer.tokens
            special.update((token, spelled[token].decode("utf-8", "replace")) for token in answer.special)
            await asyncio.sleep(0)
        word = next((token for token, text in enumerate(spelled) if text[:1] == b" " and text[1:].isalpha()), None)
        strips = word is not None and not (await self._decoded(word, deadline)).startswith(" ")
        table = TokenTable.packed(PackedTokens.of(spelled), strips_leading_space=strips)
        return Vocabulary(table, size, special)

    async def _decoded(self, token_id: int, deadline: float) -> str:
        """The text of one token, as the service decodes it."""
        wanted = tokenizer_pb2.DetokenizeInput(
            stream_id=1, options=tokenizer_pb2.DetokenizeOptions(), token_ids=[token_id], end=True
        )

        async def ask(replica: TokenizerReplica) -> str:
            left = deadline - asyncio.get_running_loop().time()
            call = replica.stub.Detokenize(iter([tokenizer_pb2.DetokenizeRequest(inputs=[wanted])]), timeout=left)
            try:
                return "".join([output.text async for answer in call for output in answer.outputs])
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

        return await self._patiently(ask, deadline)

    async def _fetch_parts(self, fingerprint: bytes, request_id: str, deadline: float) -> Vocabulary | None:
        """The vocabulary with this fingerprint; None if the service has another."""
        tokens: list[bytes] = []
        lengths = array("I")
        special: dict[int, str] = {}
        room = _MOST_VOCABULARY_BYTES
        while True:
            request = tokenizer_pb2.GetVocabularyRequest(first=len(lengths))
            part = await self._call(lambda replica: replica.stub.GetVocabulary, request, request_id, deadline)
            if part.fingerprint != fingerprint:
                return None
            room -= len(part.tokens)
            _check_part(part, len(lengths), room)
            tokens.append(part.tokens)
            lengths.extend(part.lengths)
            names = (name.decode("utf-8", "surrogateescape") for name in part.special_names)
            special.update(zip(part.special, names, strict=True))
            if len(lengths) == part.size:
                packed = PackedTokens(b"".join(tokens), lengths)
                table = TokenTable.packed(packed, strips_leading_space=part.strips_leading_space)
                return Vocabulary(table, part.size, special)

    def forget(self) -> None:
        """The service may have been replaced: its old description is no longer valid."""
        self._info = None

    async def _tokenize(
        self,
        request: tokenizer_pb2.TokenizeRequest,
        request_id: str,
        deadline: float,
        most_tokens: MostTokens | None,
    ) -> Sequence[common_pb2.TokenIds]:
        if most_tokens is not None:
            request.max_tokens = most_tokens()
        answer = await self._patiently(lambda replica: replica.tokenize(request, request_id, deadline), deadline)
        return _sequences(answer, len(request.texts))

    @asynccontextmanager
    async def _large_turn(
        self, field: str, longest: int, request_id: str, deadline: float, cache_salt: str
    ) -> AsyncIterator[None]:
        """The turn of a request with much text, unless the service would refuse it for the characters of its longest one."""
        most = (await self.info(request_id, deadline)).max_text_bytes
        if 0 < most < longest:
            raise PromptTooLongError.in_bytes(longest, most, field=field)
        async with self._large.turn(cache_salt, deadline):
            yield

    async def _call(
        self,
        method: Callable[[TokenizerReplica], grpc.aio.UnaryUnaryMultiCallable[RequestT, AnswerT]],
        request: RequestT,
        request_id: str,
        deadline: float,
    ) -> AnswerT:
        return await self._patiently(
            lambda replica: replica.call(method(replica), request, request_id, deadline), deadline
        )

    async def _patiently(self, ask: Callable[[TokenizerReplica], Awaitable[AnswerT]], deadline: float) -> AnswerT:
        if self._absent:
            raise InvalidArgumentError(ABSENT)
        loop = asyncio.get_running_loop()
        began = loop.time()
        tried: set[TokenizerReplica] = set()
        last: UnavailableError | None = None
        while True:
            if loop.time() >= deadline:
                raise DeadlineExceededError("the deadline passed while the prompt was tokenized")
            replica = self._choose(tried)
            if replica is not None:
                try:
                    return await ask(replica)
                except UnavailableError as error:
                    last = error
                    tried.add(replica)
                    continue
            heard = max((replica.heard for replica in self._replicas()), default=began)
            if loop.time() + _PAUSE >= min(max(began, heard) + self._grace, deadline):
                raise UnavailableError("the tokenizer is not available", retry_after=1.0) from last
            tried.clear()
            await asyncio.sleep(_PAUSE)

    def _choose(self, tried: set[TokenizerReplica]) -> TokenizerReplica | None:
        """The replica with the fewest calls, in turn, of those not tried yet; one that is not well only if there is no other."""
        replicas = self._replicas()
        self._turn += 1
        count = len(replicas)
        order = (replicas[(self._turn + index) % count] for index in range(count))
        return min(
            (replica for replica in order if replica not in tried),
            key=lambda replica: (replica.problem is not None, replica.load),
            default=None,
        )


def _wrong(what: str) -> InternalError:
    """The error of an answer that no tokenizer should give."""
    return InternalError(f"the tokenizer answered with {what}")


def _sequences(answer: tokenizer_pb2.TokenizeResponse, count: int) -> Sequence[common_pb2.TokenIds]:
    if len(answer.sequences) != count:
        raise _wrong(f"the tokens of {len(answer.sequences)} texts, and was asked for those of {count}")
    return answer.sequences


def _check_part(part: tokenizer_pb2.GetVocabularyResponse, before: int, room: int) -> None:
    """Refuses a part of a vocabulary that contradicts its own description, or would never end."""
    if not 0 < part.size <= _MOST_TOKENS:
        raise _wrong(f"a vocabulary of {part.size} tokens")
    if not 0 < len(part.lengths) <= part.size - before:
        raise _wrong(f"{len(part.lengths)} tokens more than {before} of a vocabulary of {part.size}")
    if sum(part.lengths) != len(part.tokens) or room < 0:
        raise _wrong(f"{len(part.tokens)} bytes of tokens of {sum(part.lengths)}")
    if len(part.special) != len(part.special_names) or any(token >= part.size for token in part.special):
        raise _wrong("special tokens that it does not have")


def _write_turns(turns: Sequence[Turn], request: tokenizer_pb2.ApplyChatTemplateRequest) -> Steps[None]:
    for at in range(0, len(turns), _TURNS_AT_ONCE):
        request.messages.extend(to_turns(turns[at : at + _TURNS_AT_ONCE]))
        yield


async def _gather(token_ids: Sequence[int], stint: Stint) -> TokenIds:
    return gather(token_ids) if len(token_ids) <= MANY else await in_turns(gather_many(token_ids), stint)
