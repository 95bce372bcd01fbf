"""One token stream on its way to text, reasoning and tool calls: detokenizer, then output parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sapwood_tokenizer.decode.detokenizer import Detokenizer, Piece
from sapwood_tokenizer.output.incremental.events import Event, ReasoningDelta
from sapwood_tokenizer.output.output_parser import OutputParser, ParserOptions


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream is decoded.

    Attributes:
        stop: Stop strings, none empty; looked for in all that the model writes, before it is parsed.
        skip_special_tokens: Whether special tokens are left out, but for those that a parser needs.
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


class OutputStream:
    """Decodes and parses one stream. Nothing may be pushed after a piece with a ``stop_match`` or after :meth:`finish`.

    Args:
        detokenizer: Used by nobody else.
        parser: Used by nobody else.

    Attributes:
        reasoning_tokens: Tokens so far whose text is reasoning.
    """

    def __init__(self, detokenizer: Detokenizer, parser: OutputParser) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self.reasoning_tokens = 0
        self._silent = 0
        """Tokens since the last event."""

    def push(self, token_ids: Sequence[int]) -> StreamPiece:
        """Takes new tokens; returns what became certain, possibly nothing."""
        if len(token_ids) > 1 and self._parser.may_reason:  # one by one, to see which of them are reasoning
            events: list[Event] = []
            tokens, stop_match = 0, None
            for token_id in token_ids:
                some, tokens, stop_match = self._push((token_id,))
                events += some
                if stop_match is not None:
                    break
            return events, tokens, stop_match
        return self._push(token_ids)

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
