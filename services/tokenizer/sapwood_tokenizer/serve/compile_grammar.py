"""Compiles a schema, expression, rules or structural tag to the grammar that workers mask with.

``sapwood_common.grammar`` says how a grammar is compiled, bounded and kept, and why with llguidance (figures against xgrammar).
Compilation runs in processes of its own; one that passes its deadline is killed, while the other requests of this service
keep their latency.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from sapwood.v1 import common_pb2, tokenizer_pb2
from sapwood_common.errors import InvalidArgumentError, SapwoodError, UnimplementedError
from sapwood_common.grammar.compiler import CompilerLimits, GrammarCompiler
from sapwood_common.grammar.convert import to_grammar
from sapwood_common.grammar.source import GrammarSource
from sapwood_common.grammar.vocabulary import TokenVocabulary, load_vocabulary, vocabulary_of_json
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_tokenizer.grammar.source import ModelFormat, output_source
from sapwood_tokenizer.serve.convert import checked_salt, to_calls_wanted
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

_LARGE = 32 * 1024
"""Bytes of a request from which its grammar is put together in a thread."""
_MADE = "grammar.structural_tag"
"""The field of a grammar that was put together here."""


class Grammars:
    """Answers ``CompileGrammar``. Lives on one event loop.

    Args:
        vocabulary: The model's tokens; None if its files hold none.
        limits: Bounds on compilation and on the cache.
        template: The model's chat template, "" if it has none.
    """

    def __init__(self, vocabulary: TokenVocabulary | None, limits: CompilerLimits, template: str = "") -> None:
        names = frozenset[str]() if vocabulary is None else frozenset(vocabulary.special_names)
        self._model = ModelFormat(template, names)
        self._fingerprint = b"" if vocabulary is None else vocabulary.fingerprint
        self._most_bytes = limits.max_source_bytes
        self._large: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Salt -> held while one large request of that caller is read."""
        self._compiler = (
            None if vocabulary is None else GrammarCompiler(self._fingerprint, vocabulary.special_names, limits)
        )

    @property
    def fingerprint(self) -> bytes:
        """What is equal for equal vocabularies; empty if there is none."""
        return self._fingerprint

    async def compile(
        self, request: tokenizer_pb2.CompileGrammarRequest, time_remaining: float | None
    ) -> tokenizer_pb2.CompileGrammarResponse:
        """Compiles or finds a grammar.

        Args:
            request: The request.
            time_remaining: Seconds to the caller's deadline, if it has one.

        Raises:
            InvalidArgumentError: The grammar is at fault; its field is named.
            DeadlineExceededError: It took too long and was stopped.
            ResourceExhaustedError: Too many compilations wait already.
            UnimplementedError: The model's files hold no vocabulary.
        """
        if self._compiler is None:
            raise UnimplementedError("the model's files hold no vocabulary, so grammars cannot be compiled")
        calls = to_calls_wanted(request.tool_calls) if request.HasField("tool_calls") else None
        answer = _answer(request.grammar) if calls is None or request.HasField("grammar") else None
        reasoning_open = request.reasoning_open if request.HasField("reasoning_open") else None
        if len(request.tool_calls.tools) > self._most_bytes:
            raise InvalidArgumentError(
                f"the tools have {len(request.tool_calls.tools)} characters; at most {self._most_bytes} are compiled",
                field="tool_calls.tools",
            )
        make = partial(output_source, answer, calls, request.reasoning_parser, reasoning_open, self._model)
        salt = checked_salt(request.cache_salt)
        if request.ByteSize() < _LARGE:
            source, parser = make()
        else:
            async with self._large.setdefault(salt, asyncio.Lock()):
                source, parser = await asyncio.to_thread(make)
        source = replace(source, salt=salt)
        cached = self._compiler.find(source) is not None
        try:
            compiled = await self._compiler.compile_noting(source, time_remaining)
        except SapwoodError as error:
            if (
                error.field == _MADE and source.text != request.grammar.structural_tag
            ):  # the field is of the source made here, not of the request
                error.field = "tool_calls.tools" if answer is None else f"grammar.{answer.kind}"
            raise
        return tokenizer_pb2.CompileGrammarResponse(
            compiled=compiled.artefact,
            key=source.key(self._fingerprint),
            cached=cached,
            tool_parser=parser,
            left_out=compiled.left_out,
        )

    async def close(self) -> None:
        """Ends all compilations."""
        if self._compiler is not None:
            await self._compiler.close()


def _answer(message: common_pb2.Grammar) -> GrammarSource:
    source = to_grammar(message)
    if isinstance(source, bytes):
        raise InvalidArgumentError("grammar.compiled is compiled already", field="grammar.compiled")
    return source


def build_grammars(path: Path, loaded: LoadedTokenizer, config: TokenizerConfig) -> Grammars:
    """Reads the model's vocabulary; slow.

    Args:
        path: The model.
        loaded: Its chat template, and its tokenizer for files that only the tokenizer can read.
        config: The bounds.

    Raises:
        ConfigError: It cannot be read; the message names the file.
    """
    limits = CompilerLimits(
        max_source_bytes=config.grammar_timeout.max_bytes,
        timeout=config.grammar_timeout.seconds,
        processes=config.grammar_timeout.processes,
        cache_bytes=int(config.grammar_timeout.cache_mb * (1 << 20)),
    )
    vocabulary = load_vocabulary(path) if path.is_dir() or path.suffix == ".gguf" else None
    if vocabulary is None:
        vocabulary = vocabulary_of_json(json.loads(loaded.tokenizer.to_str()))
    return Grammars(vocabulary, limits, loaded.chat_template or "")
