"""What runs in the process that compiles: the library bounds neither its time nor its memory."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from sapwood_common.grammar.json_schema import STEPS, GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_worker.model.grammar.xgrammar.checks import checked_schema, checked_tag

_MOST_WHITESPACE = 32
_LONGEST_MESSAGE = 400


def tokenizer_info(tokens: Sequence[bytes], end_token_ids: Sequence[int]) -> Any:
    """The library's index of a vocabulary; a token without bytes is never allowed, unless it is an end."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        list(tokens), vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(end_token_ids)
    )


def start(settings: bytes) -> Callable[[bytes], bytes]:
    """What answers a source by ``+`` and the compiled grammar, or by ``-`` and why there is none.

    Args:
        settings: JSON: tokens (in Latin-1), ends, special (names).
    """
    import xgrammar

    given = json.loads(settings)
    info = tokenizer_info([token.encode("latin-1") for token in given["tokens"]], given["ends"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def answer(question: bytes) -> bytes:
        kind, text, whitespace, lenient = json.loads(question)
        source = GrammarSource(kind, text, GrammarOptions(whitespace, lenient))
        try:
            return b"+" + str(_compile(compiler, source, given["special"]).serialize_json()).encode()
        except GrammarError as error:
            message = str(error)
        except (MemoryError, RecursionError):
            message = "it is too large or nested too deep"
        except RuntimeError as error:
            message = f"the grammar backend xgrammar cannot compile it: {_readable(str(error))}"
        return b"-" + message[:_LONGEST_MESSAGE].encode()

    return answer


def _compile(compiler: Any, source: GrammarSource, special_names: Sequence[str]) -> Any:
    """Compiles; leaves out more and more of lenient schemas until what is left compiles."""
    if source.kind not in ("json_schema", "structural_tag"):
        return _compile_step(compiler, source, special_names, 0)
    try:
        return _compile_step(compiler, source, special_names, 0)
    except (GrammarError, RuntimeError):
        if not source.options.lenient and '"lenient": true' not in source.text:
            raise
        for step in range(1, STEPS):
            with contextlib.suppress(GrammarError, RuntimeError):
                return _compile_step(compiler, source, special_names, step)
        return _compile_step(compiler, source, special_names, STEPS)


def _compile_step(compiler: Any, source: GrammarSource, special_names: Sequence[str], step: int) -> Any:
    match source.kind:
        case "json_schema":
            return compiler.compile_json_schema(
                checked_schema(source.text, lenient=source.options.lenient, step=step),
                any_whitespace=source.options.any_whitespace,
                separators=None if source.options.any_whitespace else (",", ":"),
                strict_mode=False,
                max_whitespace_cnt=_MOST_WHITESPACE if source.options.any_whitespace else None,
            )
        case "regex":
            return compiler.compile_regex(source.text)
        case "ebnf":
            if "::=" in source.text:
                return compiler.compile_grammar(source.text)
            return compiler.compile_lark(source.text)
        case "structural_tag":
            return compiler.compile_structural_tag(checked_tag(source, special_names, step))


def _readable(message: str) -> str:
    """The library's message without the place in its sources."""
    return " ".join(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", message).split())
