"""The grammar backends say the same of the same texts, or refuse a grammar by name."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from sapwood_common.errors import ConfigError, DeadlineExceededError, InvalidArgumentError
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_worker.model.grammar.backend import GrammarNeeds
from sapwood_worker.model.grammar.bounded_process import ProcessDiedError, TimeUpError
from sapwood_worker.model.grammar.registry import make_backend
from sapwood_worker.model.grammar.xgrammar import XgrammarBackend, checked_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"enum": [{"x": 1}, {"x": 2}]}},
        "end": "</call>",
    }
}
# Kind, grammar, texts that match, texts that do not.
CASES: dict[str, tuple[str, Any, list[str], list[str]]] = {
    "schema": (
        "json_schema",
        PERSON,
        ['{"name": "Ada", "age": 36}', '{"name":"Ada","age":3}'],
        [
            '{"name": "A", "age": 36}',
            '{"name": "Ada", "age": 2}',
            '{"name": "Ada"}',
            '{"name": "Ada", "age": 36, "x": 1}',
        ],
    ),
    "choice": ("json_schema", {"enum": ["a", 1, None]}, ['"a"', "1", "null"], ["2", '"b"']),
    "reference": (
        "json_schema",
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        },
        ["[]", "[[], [[]]]"],
        ["[[], [], []]", "[1]"],
    ),
    "date": ("json_schema", {"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2023-13-01"']),
    "regex": ("regex", r"[a-f]{2,3}:\d+", ["ab:1", "abc:123"], ["a:1", "ab:", "abg:1"]),
    "ebnf": ("ebnf", 'root ::= digit ("+" digit)*\ndigit ::= [0-9]', ["1", "1+2+3"], ["+", "1+", "12"]),
    "choices": (
        "ebnf",
        "start: CHOICE\nCHOICE: " + " | ".join(json.dumps("a" * (n % 3) + f"é{n}") for n in range(4096)),
        ["é0", "aé1", "aé10", "aé4"],
        ["é", "a", "aé", "é4096", "é00"],
    ),
    "lark": ("ebnf", 'start: "a" DIGITS\nDIGITS: /[0-9]+/', ["a1", "a123"], ["a", "1", "ab"]),
    "structural tag": (
        "structural_tag",
        TAG,
        ['<call>{"x":1}</call>'],
        ["<call></call>", '<call>{"x": 3}</call>', '{"x": 1}'],
    ),
    "alphabet": ("regex", "[äöü]{2}|日本", ["äö", "日本"], ["aa", "日"]),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_that_match_are_taken_and_others_are_not(store, compile_grammar, end_token, case):
    kind, grammar, matching, others = CASES[case]
    compiled = compile_grammar(kind, grammar)
    for text in matching:
        state = store.build(compiled)
        assert all(state.accept(byte) for byte in text.encode()), (text, state.error)
        assert state.finished or state.accept(end_token), (text, state.error)
        assert state.finished
    for text in others:
        state = store.build(compiled)
        taken = [*text.encode(), end_token]
        assert store.build(compiled).validate(taken) < len(taken), text
        assert not all(state.accept(each) for each in taken), text


def test_jump_forward_names_what_alone_may_come_and_never_the_end(store, compile_grammar, end_token):
    state = store.build(compile_grammar("regex", "xy(z|w)?"))
    assert state.forced() == ord("x")
    assert state.accept(ord("x"))
    assert state.accept(ord("y"))
    assert state.forced() is None
    assert state.accept(ord("z"))
    assert state.forced() is None


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "minLength and maxLength beside pattern"),
        ({"type": "string", "pattern": "(a[0-9]{1,3})?b"}, "a pattern that repeats"),
        ({"type": "string", "pattern": "a.b"}, "a pattern that matches quotes"),
        ({"type": "string", "pattern": "[^a]b"}, "a pattern that matches quotes"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf"),
        ({"type": "object", "required": ["z"]}, "required 'z'"),
        ({"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {"type": "integer"}}}, "minimum beside \\$ref"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not without a type"),
        ({"minLength": 3}, "minLength without a type"),
    ],
)
def test_what_xgrammar_lets_through_is_refused_unless_the_schema_is_lenient(schema, named):
    with pytest.raises(GrammarError, match=f"xgrammar does not enforce {named}"):
        checked_schema(json.dumps(schema), lenient=False)
    checked_schema(json.dumps(schema), lenient=True)


@pytest.mark.slow
def test_xgrammar_refuses_what_it_cannot_have_with_its_field(vocabulary, end_token, compile_grammar):
    backend = make_backend("xgrammar", GrammarNeeds(vocabulary, len(vocabulary.tokens), (end_token,), 30.0))
    special = {"format": {"type": "tag", "begin": "<|tool|>", "content": {"type": "any_text"}, "end": "."}}
    for kind, grammar, message in (
        ("json_schema", {"type": "array", "items": {"type": "integer", "multipleOf": 5}}, "multipleOf"),
        ("regex", "a(?i:b)", "xgrammar cannot compile it: Regex"),
        ("structural_tag", special, "special token '<|tool|>'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message.replace("|", "\\|")) as caught:
            backend.build(compile_grammar(kind, grammar))
        assert caught.value.field == f"grammar.{kind}"
    backend.close()


class Failing:
    """In place of the processes: each call fails in one way."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def call(self, question: bytes) -> bytes:
        raise self._error

    def close(self) -> None:
        """There is nothing to end."""


@pytest.mark.slow
def test_kept_grammars_are_bounded_and_a_dead_compilation_ends_one_request(vocabulary, end_token, compile_grammar):
    backend = XgrammarBackend(GrammarNeeds(vocabulary, len(vocabulary.tokens), (end_token,), 30.0), max_kept_bytes=2000)
    for letter in "abcdef":
        backend.build(compile_grammar("regex", letter))
    assert 1 <= backend.num_kept < 6
    backend.close()
    for error, refusal in ((TimeUpError, DeadlineExceededError), (ProcessDiedError, InvalidArgumentError)):
        backend._processes = Failing(error)  # type: ignore[assignment]
        with pytest.raises(refusal) as caught:
            backend.build(compile_grammar("regex", "xyz"))
        assert caught.value.field == "grammar.regex"
        assert backend.build(compile_grammar("regex", "f")).accept(ord("f"))


def walk(state, tokens: tuple[bytes, ...], end_token: int, seed: int) -> bytes | None:
    """A text that the state allows at every step, with a liking of what closes; None if it has no end after 400 tokens."""
    chance = random.Random(seed)
    text = b""
    mask = np.zeros(-(-(len(tokens) + 13) // 32), np.int32)
    for _ in range(400):
        state.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        likings = [60 if token == end_token or tokens[token] in b'"}]0123' else 1 for token in allowed]
        [token] = chance.choices(allowed, likings)
        assert state.accept(token), state.error
        text += b"" if token == end_token else tokens[token]
        if state.finished:
            return text
    return None


@pytest.mark.slow
def test_what_xgrammar_takes_of_the_hundred_schemas_it_completes_validly(
    vocabulary, end_token, compile_grammar, json_schemas, check_json
):
    size = len(vocabulary.tokens) + 13
    backend = make_backend("xgrammar", GrammarNeeds(vocabulary, size, (end_token,), 60.0))
    taken, ended = 0, 0
    for name, schema in json_schemas.items():
        compiled = compile_grammar("json_schema", schema)
        try:
            states = [backend.build(compiled) for _ in range(8)]
        except InvalidArgumentError as error:
            assert "xgrammar" in error.message, name
            continue
        taken += 1
        for seed, state in enumerate(states):
            text = walk(state, vocabulary.tokens, end_token, seed)
            if text is not None:
                ended += 1
                check_json(text, schema)
    print(taken, ended)
    assert taken >= 60
    assert ended >= 6 * taken
    backend.close()


def test_an_unknown_backend_is_named_with_those_there_are(vocabulary):
    with pytest.raises(ConfigError, match=r"--structured-output backend=nope: 'nope' is none of llguidance, xgrammar"):
        make_backend("nope", GrammarNeeds(vocabulary, len(vocabulary.tokens), (), 1.0))


def test_a_package_can_bring_a_grammar_backend(plugin, vocabulary, end_token, compile_grammar):
    plugin(
        "sapwood.grammar_backends",
        "counting",
        """
        from sapwood_worker.model.grammar.llguidance import make_llguidance

        class Counting:
            def __init__(self, needs):
                self.inner = make_llguidance(needs)
                self.built = 0

            def build(self, compiled, generated=()):
                self.built += 1
                return self.inner.build(compiled, generated)
        """,
        "Counting",
    )
    backend: Any = make_backend("counting", GrammarNeeds(vocabulary, len(vocabulary.tokens), (end_token,), 1.0))
    assert backend.build(compile_grammar("regex", "a")).accept(ord("a"))
    assert backend.built == 1
