"""One request's tokens on their way to text, reasoning and tool calls, decoded here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sapwood_common.errors import DeadlineExceededError, InternalError, InvalidArgumentError, SapwoodError
from sapwood_net.pacing.time_share import TimeShare
from sapwood_router.fleet.registry import Registry
from sapwood_router.request.output import WINDOW, OutputBuffer, OutputChunk, OutputOptions, OutputStream
from sapwood_router.tokenizer.client import TokenizerClient
from sapwood_router.tokenizer.replica import TokenizerReplicas
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.parsed_stream import MakeParser, ParsedStream, StreamOptions, open_stream
from sapwood_text.tool_parser.tools import Tools
from sapwood_text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Tokens that are decoded without a break: some tens of microseconds, with parsers some hundreds."""


class TextStream(OutputStream):
    """Decodes what is pushed, at once if it is not much.

    Args:
        vocabulary: The model's tokens.
        decoded: Turns them into events; no other object uses it.
        share: The time in which much is decoded, between other work of the event loop.
        whole: The output is taken in one piece, at its end.
        eager: Whether even then each token is decoded as it comes, because it may end the output.
    """

    def __init__(
        self, vocabulary: Vocabulary, decoded: ParsedStream, share: TimeShare, *, whole: bool, eager: bool
    ) -> None:
        super().__init__(whole=whole)
        self._vocabulary = vocabulary
        self._decoded = decoded
        self._share = share
        self._gathers = whole and not eager
        self._waiting = array("I")
        """Tokens that are not decoded, behind the first ``_at``, which are."""
        self._at = 0
        self._end_pushed = False
        self._output = OutputBuffer()
        self._stop_match: str | None = None

    def push(self, token_ids: Sequence[int], *, end: bool = False) -> bool:
        if self.over or self._end_pushed:
            return False
        self._end_pushed = end
        if self._gathers or self._waiting or len(token_ids) > _AT_ONCE:
            self._waiting.extend(token_ids)
            undecoded = len(self._waiting) - self._at
            if end or undecoded >= _AT_ONCE:
                if undecoded > _AT_ONCE:
                    self._share.add(self)
                else:
                    self.go_on(0.0)
        else:
            self._decode(token_ids, end=end)
        return max(len(self._waiting), self._tokens - self._tokens_taken) >= WINDOW and self.full

    def go_on(self, until: float) -> bool:
        """Decodes what waits; as ``time_share.Worker``."""
        waiting, clock = self._waiting, self._share.clock
        while not self.over:
            token_ids = waiting[self._at : self._at + _AT_ONCE]
            self._at += len(token_ids)
            if self._at < len(waiting):
                self._decode(token_ids, end=False)
                if clock() >= until:
                    return True
            else:
                del waiting[:]
                self._at = 0
                self._decode(token_ids, end=self._end_pushed)
                break
        self._tell_pusher()
        return False

    def close(self) -> None:
        self._share.drop(self)
        super().close()

    def _decode(self, token_ids: Sequence[int], *, end: bool) -> None:
        try:
            self._take(token_ids, end=end)
        except Exception as error:  # a fault of a parser ends this stream alone
            logger.error("an output cannot be decoded", exc_info=error)
            self.fail(InternalError("an output cannot be decoded; the router's log says why"))

    def _take(self, token_ids: Sequence[int], *, end: bool) -> None:
        size = self._vocabulary.size
        for token in token_ids:
            if token >= size:
                self.fail(InternalError(f"a worker sent token id {token}, and the vocabulary's size is {size}"))
                return
        decoded, output = self._decoded, self._output
        events, tokens, stop_match = decoded.push(token_ids)
        fresh = output.add_events(events)
        if end and stop_match is None:
            events, tokens, stop_match = decoded.finish()
            output.add_events(events)
        elif stop_match is not None:
            end = True
        elif not fresh and tokens <= self._tokens:
            return
        self._tokens = tokens
        self._stop_match = stop_match
        self._more(end=end)

    def _waiting_tokens(self) -> int:
        return max(len(self._waiting) - self._at, self._tokens - self._tokens_taken)

    def _chunk(self) -> OutputChunk:
        return OutputChunk(
            self._output.take(), self._tokens, self._ended, self._stop_match, self._decoded.reasoning_tokens
        )


class TextStreams:
    """Opens streams of one model.

    Args:
        client: Knows the model's vocabulary.
        make_parser: Makes the parsers of outputs.
    """

    def __init__(self, client: TokenizerClient, make_parser: MakeParser = OutputParser) -> None:
        self._client = client
        self._make_parser = make_parser
        self._share = TimeShare()
        self._tools: Callable[[str], Tools] = lru_cache(maxsize=16)(
            Tools.from_json
        )  # the choices of a request share theirs

    async def open(self, options: OutputOptions, request_id: str, deadline: float, *, whole: bool) -> TextStream:
        """A new stream, read in one piece at its end if ``whole``.

        Args:
            options: How its tokens become output.
            request_id: For the tokenizer's log, where it is asked for the vocabulary.
            deadline: On the event loop's clock.

        Raises:
            InvalidArgumentError: The tools are malformed, or there is to be no tokenizer.
            InternalError: No parser here has the name that the tokenizer gave.
            SapwoodError: The vocabulary is not known, and the tokenizer does not give it.
        """
        vocabulary = await self._client.vocabulary(request_id, deadline)
        decoding = self._decoding(options)
        try:
            decoded = open_stream(vocabulary, decoding, self._make_parser)
        except InvalidArgumentError as error:  # the parsers' names are the tokenizer's
            raise InternalError(
                f"the tokenizer names a parser that this router does not have: {error.message}"
            ) from error
        return TextStream(vocabulary, decoded, self._share, whole=whole, eager=bool(options.stop))

    def _decoding(self, options: OutputOptions) -> StreamOptions:
        return StreamOptions(
            stop=options.stop,
            skip_special_tokens=options.skip_special_tokens,
            parsers=ParserOptions(
                tool_parser=options.tool_parser,
                reasoning_parser=options.reasoning_parser,
                reasoning_open=options.reasoning_open,
                tools=self._tools(options.tools),
                id_seed=options.call_id_seed,
            ),
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
        )


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One tokenizer service, whatever its number of replicas: of one vocabulary and one chat template.

    Attributes:
        replicas: As they come and go.
        client: Makes tokens of prompts.
        streams: Make text of tokens.
    """

    replicas: TokenizerReplicas
    client: TokenizerClient
    streams: TextStreams

    async def text_of(
        self, token_ids: Sequence[int], request_id: str, deadline: float, *, skip_special_tokens: bool
    ) -> str:
        """What tokens say where a model writes them; each must be below the vocabulary's size.

        Args:
            token_ids: The tokens.
            request_id: For the service's log.
            deadline: On the event loop's clock.
            skip_special_tokens: Whether special tokens are left out.

        Raises:
            SapwoodError: The service's own error; UnavailableError if it is gone; DeadlineExceededError.
        """
        options = OutputOptions(skip_special_tokens=skip_special_tokens)
        stream = await self.streams.open(options, request_id, deadline, whole=True)
        written = asyncio.Event()
        stream.follow(written.set)
        try:
            async with asyncio.timeout_at(deadline):
                stream.push(token_ids, end=True)
                await written.wait()
            return stream.take().output.text
        except TimeoutError:
            raise DeadlineExceededError("the deadline passed before the tokens were text") from None
        finally:
            stream.close()


class Tokenizers:
    """The tokenizer services that this router uses.

    Args:
        usual: For models that have none of their own.
        of_models: Models' own.
        registry: Knows which model is meant where a request names none.
    """

    def __init__(self, usual: Tokenizer, of_models: Mapping[str, Tokenizer], registry: Registry) -> None:
        self._usual = usual
        self._of_models = of_models
        self._registry = registry

    @property
    def problem(self) -> str | None:
        """Why nothing can be tokenized; None while one of them is well."""
        problems = [("", self._usual), *((f" of {model}", own) for model, own in self._of_models.items())]
        if any(item.client.problem is None for _, item in problems):
            return None
        return "; ".join(f"tokenizer{whose} {item.client.problem}" for whose, item in problems)

    def of(self, model: str | None) -> Tokenizer:
        """The tokenizer of a model, as a request names it."""
        if not self._of_models:
            return self._usual
        if not model:  # as for the registry, an empty name is none
            try:
                model = self._registry.resolve(None)
            except SapwoodError:  # no model is known yet, or the request must name one: a later check reports it
                return self._usual
        elif model not in self._of_models:
            with contextlib.suppress(SapwoodError):  # an adapter's name stands for its model
                model = self._registry.resolve(model)
        return self._of_models.get(model, self._usual)

    def all(self) -> Iterable[Tokenizer]:
        """Each of them."""
        return (self._usual, *self._of_models.values())
