"""One token stream on its way to text, reasoning and tool calls: detokenizer, then output parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sapwood_text.detokenizer import Detokenizer, Piece
from sapwood_text.incremental.events import Event, ReasoningDelta
from sapwood_text.incremental.parser import Parser
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.vocabulary import ApartTokens, Vocabulary


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream is decoded.

    Attributes:
        stop: Stop strings, none empty; looked for in all that the model writes, before it is parsed.
        skip_special_tokens: Whether special tokens are left out, except those that a parser needs.
        parsers: The parsers that it goes through.
        include_stop: Whether the stop string that ends the text is part of it.
        min_tokens: Tokens whose text no stop string ends.
    """

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    parsers: ParserOptions = field(default_factory=ParserOptions)
    include_stop: bool = False
    min_tokens: int = 0


StreamPiece = tuple[list[Event], int, str | None]
"""What became certain: events (text, reasoning and calls); how many tokens of the stream were decoded to whole characters so far,
those that a parser still holds back included; the stop string that ended the stream."""


class StreamParser(Parser, Protocol):
    """Finds reasoning and tool calls; :class:`OutputParser` is one."""

    @property
    def special_tokens(self) -> frozenset[str]:
        """Markers that the text must hold even where special tokens are left out of it."""
        ...

    @property
    def may_reason(self) -> bool:
        """Whether some of the output may be reasoning."""
        ...

    @property
    def openings(self) -> frozenset[str]:
        """The first characters of all marks around reasoning: text without them is all reasoning, or none of it is."""
        ...


MakeParser = Callable[[ParserOptions], StreamParser]
"""Makes the parser of an output; raises InvalidArgumentError if there is none."""


def open_stream(vocabulary: Vocabulary, options: StreamOptions, make_parser: MakeParser = OutputParser) -> ParsedStream:
    """A stream of a model's tokens.

    Raises:
        InvalidArgumentError: The options name no parser.
    """
    parser = make_parser(options.parsers)
    skipped = vocabulary.skipped(parser.special_tokens) if options.skip_special_tokens else frozenset[int]()
    detokenizer = Detokenizer(
        vocabulary.table, options.stop, skipped, include_stop=options.include_stop, min_tokens=options.min_tokens
    )
    apart = vocabulary.apart(parser.openings) if parser.may_reason and not options.stop else None
    return ParsedStream(detokenizer, parser, apart)


class ParsedStream:
    """Decodes and parses one stream. Nothing may be pushed after a piece with a ``stop_match`` or after :meth:`finish`.

    Args:
        detokenizer: No other object uses it.
        parser: No other object uses it.
        apart: Which tokens are read one by one to see whether they are reasoning; None: all.

    Attributes:
        reasoning_tokens: Tokens so far whose text is reasoning. Where a call is drafted in it, tokens that come together may be
            counted otherwise than one by one.
    """

    def __init__(self, detokenizer: Detokenizer, parser: StreamParser, apart: ApartTokens | None = None) -> None:
        self._apart = apart
        self._detokenizer = detokenizer
        self._parser = parser
        self.reasoning_tokens = 0
        self._silent = 0
        """Tokens since the last event."""

    def push(self, token_ids: Sequence[int]) -> StreamPiece:
        """Takes new tokens; returns what became certain, possibly nothing."""
        if len(token_ids) > 1 and self._parser.may_reason:
            events: list[Event] = []
            tokens, stop_match = 0, None
            for some_ids in self._parts(token_ids):
                some, tokens, stop_match = self._push(some_ids)
                events += some
                if stop_match is not None:
                    break
            return events, tokens, stop_match
        return self._push(token_ids)

    def _parts(self, token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """The tokens, cut so that the text of each part is all reasoning, or none of it is."""
        apart, first = self._apart, 0
        for place, token_id in enumerate(token_ids):
            if apart is None or apart[token_id]:
                if first < place:
                    yield token_ids[first:place]
                yield (token_id,)
                first = place + 1
        if first < len(token_ids):
            yield token_ids[first:]

    def finish(self) -> StreamPiece:
        """Ends the stream: releases what was held back."""
        return self._parse_end(self._detokenizer.finish())

    def _push(self, token_ids: Sequence[int]) -> StreamPiece:
        piece = self._detokenizer.push(token_ids)
        self._silent += len(token_ids)
        if piece.stop_match is not None:
            return self._parse_end(piece)
        return self._counted(self._parser.feed(piece.text)), piece.tokens, None

    def _parse_end(self, piece: Piece) -> StreamPiece:
        events = self._counted(self._parser.feed(piece.text) + self._parser.finish())
        return events, piece.tokens, piece.stop_match

    def _counted(self, events: list[Event]) -> list[Event]:
        if events:
            if any(isinstance(event, ReasoningDelta) for event in events):
                self.reasoning_tokens += self._silent
            self._silent = 0
        return events
