"""Compiles a source to the text of an artefact, with llguidance. Runs in a process that ``compiler.py`` may kill.

Compiling is: write the source in the engine's Lark syntax, build a parser over single bytes (which finds every error of the
grammar, bounded by fuel), and walk it some steps, so that a grammar that matches nothing or whose lexer explodes early is
refused here and not in the middle of an answer. The real vocabulary is not needed.

Masks admit every token that the grammar admits (``no_forcing``), not only the canonical tokens of text that is forced. So the
distribution is the model's own, conditioned on the grammar; a worker needs the vocabulary but no tokenizer; and the state
after a token does not depend on how earlier text was cut into tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import llguidance

from sapwood_common.grammar.json_schema import STEPS, GrammarError, engine_schema, parse_schema, relax
from sapwood_common.grammar.lark import lark_of_ebnf, regex
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_common.grammar.structural_tag import SchemaText, lark_of_structural_tag

_PANIC = "panic:"
_HEADER = '%llguidance {"no_forcing": true}\n'
_WALKS, _WALK_STEPS = 2, 64
_LONGEST_MESSAGE = 400
_MOST_WARNINGS = 8
_LONGEST_WARNING = 100


def parser_limits() -> llguidance.LLParserLimits:
    """Bounds on one grammar's work, here and in workers: about 20 ms to build it; at worst 20 ms and 100 MB for a mask.

    Items of a row are compared with each other, so their number counts squared: rules that match a text in many ways make
    them many. A thousand alternatives have room. JSON schemas and usual rules need a tenth, with 262 144 tokens, too.
    """
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=4_000,
        max_items_in_row=1_200,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def engine_message(message: str) -> str:
    """The engine's error for a caller: without the excerpt of the grammar that it appends."""
    lines = message.replace("<non-verbose/>", "").split("\n")
    if message.startswith(_PANIC):  # the library's own check; the text behind it names its source file
        return "it is too large"
    kept = [line for line in lines if not line.lstrip()[:1].isdigit() and line.strip(" |^")]
    text = " ".join(line.strip() for line in kept).removeprefix("failed to compile JSON schema: ")
    if text.startswith("at ") and "): " in text:  # a place in the text we wrote, not in the caller's
        text = text.partition("): ")[2].removeprefix("failed to compile JSON schema: ")
    return text[:_LONGEST_MESSAGE] or "it cannot be compiled"


class GrammarBuilder:
    """Compiles sources for one vocabulary.

    Args:
        special_names: Names of its special tokens.
    """

    def __init__(self, special_names: Sequence[str]) -> None:
        self._special_names = tuple(special_names)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokenizer(self._special_names)))

    def compile(self, source: GrammarSource) -> str:
        """The grammar in the engine's own syntax.

        Raises:
            GrammarError: It is malformed, cannot be enforced, matches nothing or needs too much work.
        """
        return self.compile_noting(source)[0]

    def compile_noting(self, source: GrammarSource) -> tuple[str, list[str]]:
        """As :meth:`compile`, and what was left out of lenient schemas because it cannot be enforced."""
        try:
            return self._build(_HEADER + self._lark(source, _whole_schema))
        except GrammarError as error:
            if source.kind not in ("json_schema", "structural_tag"):
                raise
            alone = _Alone(self)
            lark = self._lark(source, alone.schema_text)  # names the schema that is at fault, if it is strict
            if not alone.left_out:
                raise error from None
            built, ignored = self._build(_HEADER + lark)
            return built, [*alone.left_out, *ignored]

    def _build(self, lark: str) -> tuple[str, list[str]]:
        matcher = self._matcher(lark)
        self._walk(matcher)
        return lark, [_shortened(warning) for warning in matcher.get_grammar_warnings()[:_MOST_WARNINGS]]

    def _matcher(self, lark: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(engine_message(matcher.get_error()))
        return matcher

    def _lark(self, source: GrammarSource, schema_text: SchemaText) -> str:
        match source.kind:
            case "json_schema":
                return f"start: %json {schema_text(parse_schema(source.text), source.options, '')}"
            case "regex":
                return f"start: {regex(source.text)}"
            case "ebnf":
                return lark_of_ebnf(source.text).replace("%llguidance {}", "")
            case "structural_tag":
                return lark_of_structural_tag(source.text, source.options, self._special_names, schema_text)

    def check_schema(self, text: str) -> None:
        """Raises GrammarError if a schema in the engine's form cannot be compiled alone."""
        self._walk(self._matcher(f"{_HEADER}start: %json {text}"))

    def check_pattern(self, pattern: str) -> str:
        """The fault in a regular expression of a schema; "" if there is none."""
        try:
            self._matcher(f"{_HEADER}start: %json {json.dumps({'type': 'string', 'pattern': pattern})}")
        except GrammarError as error:
            return str(error)
        return ""

    def _walk(self, matcher: llguidance.LLMatcher) -> None:
        chance = random.Random(0)
        for _ in range(_WALKS):
            for step in range(_WALK_STEPS):
                mask = matcher.compute_bitmask()
                if matcher.is_error():
                    reason = engine_message(matcher.get_error())
                    if reason.startswith("NoExtension"):
                        reason = "nothing matches it" if step == 0 else "after some text nothing may follow"
                    raise GrammarError(reason)
                allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
                if not allowed:
                    break  # at the end, or where only a special token may follow
                matcher.consume_token(chance.choice(allowed))
                if matcher.is_stopped():
                    break
            matcher.reset()


class _Alone:
    """Writes each schema of a grammar so that it can be compiled alone; a lenient schema loses the keywords that cannot be
    enforced.

    Attributes:
        left_out: What was left out.
    """

    def __init__(self, builder: GrammarBuilder) -> None:
        self._builder = builder
        self.left_out: list[str] = []

    def schema_text(self, schema: Any, options: GrammarOptions, field: str) -> str:
        """The schema in the engine's form. Raises GrammarError, with the field, if it cannot be compiled."""
        written = json.dumps(schema)
        first: GrammarError | None = None
        for step in range(STEPS + 1 if options.lenient else 1):
            left_out: list[str] = []
            if step:
                schema, left_out = relax(json.loads(written), step, self._builder.check_pattern)
            try:
                text = self._checked(schema, options)
            except GrammarError as error:
                if step and _is_contradiction(error):  # it can be enforced, and nothing matches it
                    raise GrammarError(str(error), field) from None
                first = first or error
                continue
            if step:
                self.left_out += left_out or ["what the engine refuses"]
            return text
        assert first is not None
        raise GrammarError(str(first), field or first.field)

    def _checked(self, schema: Any, options: GrammarOptions) -> str:
        text = engine_schema(schema, options)
        self._builder.check_schema(text)
        return text


def _whole_schema(schema: Any, options: GrammarOptions, _field: str) -> str:
    return engine_schema(schema, options)


def _is_contradiction(error: GrammarError) -> bool:
    return str(error).startswith(
        ("Unsatisfiable schema", "the schema cannot be satisfied", "the schema is false", "nothing matches")
    )


def _shortened(warning: str) -> str:
    return warning[:_LONGEST_WARNING]


class _ByteTokenizer:
    """Single bytes, the end token, and the special tokens by name."""

    bos_token_id = None

    def __init__(self, special_names: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<sapwood-end>"]
        self.tokens += [name.encode() for name in special_names]
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        """Each byte is its own token."""
        return list(text)
