"""Converts between proto messages and the service's own types."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from sapwood.v1 import tokenizer_pb2
from sapwood_common.contract.limits import LONGEST_SALT, LONGEST_STOP, MOST_STOPS
from sapwood_common.errors import InvalidArgumentError, SapwoodError
from sapwood_common.status import code_number, reason_of
from sapwood_text.incremental.events import Event, ReasoningDelta, TextDelta, ToolCallStart
from sapwood_text.output_parser import ParserOptions
from sapwood_text.parsed_stream import StreamOptions
from sapwood_text.tool_parser.tools import Tools
from sapwood_text.vocabulary import Vocabulary
from sapwood_tokenizer.encode.encode_cache import CacheStats
from sapwood_tokenizer.encode.encoder import EncodeOptions
from sapwood_tokenizer.encode.pair_template import PairTemplate
from sapwood_tokenizer.grammar.source import CallsWanted

_MOST_TOKENS_A_PART = 65_536
"""Tokens of a vocabulary in one message."""
_TOKENS_AT_ONCE = 32_768
"""Tokens that go into a message in one piece, which takes 2 ms."""


def to_encode_options(request: tokenizer_pb2.TokenizeRequest) -> EncodeOptions:
    """The options of a request.

    Raises:
        InvalidArgumentError: Its salt is too long.
    """
    return EncodeOptions(
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        parse_special_tokens=request.parse_special_tokens if request.HasField("parse_special_tokens") else True,
        offsets=request.return_offsets,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        salt=checked_salt(request.cache_salt),
        suffix=request.suffix,
    )


def checked_salt(salt: str) -> str:
    """Returns the salt. Raises InvalidArgumentError if it is too long."""
    if len(salt) > LONGEST_SALT:
        raise InvalidArgumentError(f"cache_salt has more than {LONGEST_SALT} characters", field="cache_salt")
    return salt


def to_calls_wanted(message: tokenizer_pb2.ToolCallGrammar) -> CallsWanted:
    """Which calls an output may hold."""
    return CallsWanted(
        tools=message.tools,
        name=message.name,
        required=message.required,
        parallel=message.parallel,
        tool_parser=message.tool_parser,
    )


def fingerprint_of(vocabulary: Vocabulary, tokens: bytes) -> bytes:
    """What is equal for equal vocabularies; ``tokens`` is so for the bytes of the tokens."""
    rest = f"{vocabulary.size} {vocabulary.table.strips_leading_space} {sorted(vocabulary.special.items())}"
    return hashlib.blake2b(tokens + rest.encode(errors="replace"), digest_size=16).digest()


def vocabulary_part(vocabulary: Vocabulary, fingerprint: bytes, first: int) -> tokenizer_pb2.GetVocabularyResponse:
    """The tokens from ``first`` on, as many as one message takes; takes tens of milliseconds."""
    ids = range(first, min(first + _MOST_TOKENS_A_PART, vocabulary.size))
    tokens = [vocabulary.table.spell(token) for token in ids]
    special = {token: name for token, name in vocabulary.special.items() if token in ids}
    return tokenizer_pb2.GetVocabularyResponse(
        fingerprint=fingerprint,
        size=vocabulary.size,
        strips_leading_space=vocabulary.table.strips_leading_space,
        tokens=b"".join(tokens),
        lengths=map(len, tokens),
        special=special.keys(),
        special_names=(name.encode("utf-8", "surrogateescape") for name in special.values()),
    )


async def add_tokens(field: MutableSequence[int], token_ids: Sequence[int]) -> None:
    """Adds tokens to a field of a response; others continue now and then where there are very many."""
    for at in range(0, len(token_ids), _TOKENS_AT_ONCE):
        if at:
            await asyncio.sleep(0)
        field.extend(token_ids[at : at + _TOKENS_AT_ONCE])


def add_offsets(response: tokenizer_pb2.TokenizeResponse, offsets: Sequence[tuple[int, int]]) -> None:
    """Put the places of one sequence's tokens into a response."""
    response.offsets.add(starts=[start for start, _ in offsets], ends=[end for _, end in offsets])


def to_cache_stats(stats: CacheStats) -> tokenizer_pb2.EncodeCacheStats:
    """The statistics of a cache as a message."""
    return tokenizer_pb2.EncodeCacheStats(**asdict(stats))


def to_pair_template(pair: PairTemplate | None) -> tokenizer_pb2.PairTemplate | None:
    """The template as a message."""
    if pair is None:
        return None
    return tokenizer_pb2.PairTemplate(before=pair.before, between=pair.between, after=pair.after)


def to_stream_options(options: tokenizer_pb2.DetokenizeOptions, id_seed: str) -> StreamOptions:
    """How one stream is decoded. ``id_seed`` is used where the options give none.

    Raises:
        InvalidArgumentError: Too many or impossible stop strings, or tools in a wrong form. The field begins with
            "options.".
    """
    if len(options.stop) > MOST_STOPS:
        raise InvalidArgumentError(f"more than {MOST_STOPS} stop strings", field="options.stop")
    for stop in options.stop:
        if not 1 <= len(stop) <= LONGEST_STOP:
            raise InvalidArgumentError(f"a stop string must have 1 to {LONGEST_STOP} characters", field="options.stop")
    with within_options():
        tools = Tools.from_json(options.tools)
    return StreamOptions(
        stop=tuple(options.stop),
        skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        parsers=ParserOptions(
            tool_parser=options.tool_parser,
            reasoning_parser=options.reasoning_parser,
            reasoning_open=options.reasoning_open if options.HasField("reasoning_open") else None,
            tools=tools,
            id_seed=options.tool_call_id_seed or id_seed,
        ),
        include_stop=options.include_stop,
        min_tokens=options.min_tokens,
    )


@contextmanager
def within_options() -> Iterator[None]:
    """Prefixes the fields of errors raised within it with ``options.``."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.message, field=f"options.{error.field}") from error


def add_events(output: tokenizer_pb2.DetokenizeOutput, events: Iterable[Event]) -> None:
    """Put events into an output: texts of a kind joined, calls in order, each call's start with its arguments."""
    for event in events:
        if isinstance(event, TextDelta):
            output.text = output.text + event.text if output.text else event.text
        elif isinstance(event, ReasoningDelta):
            output.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            output.tool_calls.add(index=event.index, id=event.id, name=event.name)
        elif output.tool_calls and output.tool_calls[-1].index == event.index:
            output.tool_calls[-1].arguments += event.fragment
        else:
            output.tool_calls.add(index=event.index, arguments=event.fragment)


def write_error(error: SapwoodError, message: tokenizer_pb2.StreamError) -> None:
    """Writes the error of one stream, or one item, of a call into a message."""
    message.code = code_number(error)
    message.message = error.message
    message.field = error.field or ""
    message.reason = reason_of(error)
    if error.retry_after is not None:
        message.retry_after_ms = round(error.retry_after * 1000)
