"""Sources of every kind become grammars that admit what they should; what cannot be had is refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sapwood_common.grammar.artefact import ArtefactError, GrammarArtefact
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_router.edges.openai.response_format import answer_grammar
from sapwood_router.edges.openai.types import ChatRequest
from sapwood_worker.model.grammar.llguidance import GrammarStore

LIST = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
ENDLESS = [
    {"$ref": "#"},
    LIST,
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"anyOf": [{"$ref": "#"}, {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]},
    {"allOf": [{"type": "object"}, LIST | {"items": {"$ref": "#/allOf/1"}}]},
]


@pytest.fixture
def store(vocabulary, end_token) -> GrammarStore:
    """llguidance's: grammars are compiled for it. What other backends make of their sources is ``test_backends.py``'s affair."""
    return GrammarStore(vocabulary, len(vocabulary.tokens) + 13, (end_token,))


def admits(store: GrammarStore, compiled: bytes, text: str | list[int]) -> bool:
    """Whether the whole text, as single bytes, or the whole sequence of tokens, matches."""
    tokens = list(text.encode()) if isinstance(text, str) else text
    matcher = store.build(compiled)
    return matcher.accept_all(tokens) == len(tokens) and matcher.complete


def test_every_schema_of_the_fixtures_compiles(json_schemas, compile_grammar):
    assert len(json_schemas) == 100
    for schema in json_schemas.values():
        compile_grammar("json_schema", schema)


@pytest.mark.parametrize(
    ("text", "whitespace", "expected"),
    [
        ('{"a":1,"b":true}', True, True),
        ('{ "a" : 1 ,\n\t"b": true\r\n}', True, True),
        ('{"a":1}', True, False),
        ('{"b":true,"a":1}', True, False),
        ('{"a":1,"b":true,"c":1}', True, False),
        ('{"a":1,"b":true}', False, True),
        ('{"a": 1,"b":true}', False, False),
        ("{\n" + " " * 32 + '"a":1,"b":true}', True, True),
        ("{\n" + " " * 33 + '"a":1,"b":true}', True, False),
        ('{  "a":1,"b":true}', True, False),
        ('{\n\n"a":1,"b":true}', True, False),
    ],
)
def test_a_schema_admits_its_instances_and_bounded_white_space(store, compile_grammar, text, whitespace, expected):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert admits(store, compile_grammar("json_schema", schema, any_whitespace=whitespace), text) is expected


@pytest.mark.parametrize(
    ("format_", "text", "expected"),
    [
        ("date", "2024-02-29", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2000-02-29", True),
        ("date", "0000-01-01", False),
        ("date", "2023-04-31", False),
        ("date", "9999-12-31", True),
        ("time", "23:59:59.123+02:00", True),
        ("time", "23:59:60Z", False),
        ("time", "24:00:00Z", False),
        ("date-time", "2024-02-29T00:00:00Z", True),
        ("date-time", "2024-02-30T00:00:00Z", False),
        ("date-time", "2024-02-29 00:00:00Z", False),
    ],
)
def test_dates_and_times_are_ones_that_exist(store, compile_grammar, check_json, format_, text, expected):
    schema = {"type": "string", "format": format_}
    assert admits(store, compile_grammar("json_schema", schema), f'"{text}"') is expected
    if expected:
        check_json(f'"{text}"'.encode(), schema)


def test_a_format_and_a_pattern_hold_both(store, compile_grammar):
    compiled = compile_grammar("json_schema", {"type": "string", "format": "date", "pattern": "^2024-"})
    assert admits(store, compiled, '"2024-01-31"')
    assert not admits(store, compiled, '"2023-01-31"')
    assert not admits(store, compiled, '"2024-01-32"')


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"[0-9]{3}-[a-z]+", "123-abc", True),
        (r"[0-9]{3}-[a-z]+", "123-", False),
        (r"^a|b$", "b", True),
        (r"a/b\n", "a/b\n", True),
        (r"(?i)yes|no", "YES", True),
        (r"\p{Greek}+", "αβγ", True),
        (r"[^\"]{2,3}", "é漢", True),
        (r"x{0,2}", "", True),
    ],
)
def test_a_regular_expression_admits_whole_texts(store, compile_grammar, pattern, text, expected):
    assert admits(store, compile_grammar("regex", pattern), text) is expected


GRAMMAR = """
# sums of products
root ::= term ([+-] term)*
term ::= factor ("*" factor)*
factor ::= [0-9]{1,3} | "(" root ")"
"""


@pytest.mark.parametrize(("text", "expected"), [("1+2*(3-4)", True), ("(1", False), ("1++2", False), ("1234", False)])
def test_rules_admit_what_they_derive(store, compile_grammar, text, expected):
    assert admits(store, compile_grammar("ebnf", GRAMMAR), text) is expected


@pytest.mark.parametrize(
    ("text", "expected"), [("yes", True), ('n"o\\n', True), ("日\n", True), ("ye", False), ("", False)]
)
def test_a_choice_admits_one_of_its_texts(store, compile_grammar, text, expected):
    given = ChatRequest(messages=[], guided_choice=["yes", 'n"o\\n', "日\n"])
    grammar, _ = answer_grammar(given)
    assert grammar is not None
    assert admits(store, compile_grammar(grammar.kind, grammar.text), text) is expected


CALLS: dict[str, Any] = {
    "type": "structural_tag",
    "triggers": ["<f"],
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=say>", "schema": {"enum": ["hi"]}, "end": "</f>"},
    ],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text < f", True),
        ("so: <f=add>12</f> done", True),
        ('<f=say>"hi"</f><f=add>1</f>', True),
        ("<f=mul>12</f>", False),
        ("<f=add>x</f>", False),
        ("<f=add>12", False),
    ],
)
def test_text_is_free_until_a_trigger(store, compile_grammar, text, expected):
    assert admits(store, compile_grammar("structural_tag", CALLS), text) is expected


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TRUTH = {"type": "json_schema", "json_schema": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("format_", "text", "expected"),
    [
        ({"type": "const_string", "value": 'a"b\n'}, 'a"b\n', True),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, TRUTH]}, "xtrue", True),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "a+"}, TRUTH]}, "aaa", True),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "a+"}, TRUTH]}, "b", False),
        (tag("<t>", {"type": "any_text"}, "</t>"), "<t>any <thing></t>", True),
        (tag("<t>", {"type": "any_text"}, "</t>"), "<t>one</t>two</t>", False),
        (tag("<t>", TRUTH, ["</t>", "</u>"]), "<t>true</u>", True),
        ({"type": "grammar", "grammar": 'root ::= n "+" n\nn ::= [0-9]+'}, "1+23", True),
        (
            {"type": "tags_with_separator", "tags": [tag("<", TRUTH, ">")], "separator": ", ", "at_least_one": True},
            "<true>, <false>",
            True,
        ),
        ({"type": "tags_with_separator", "tags": [tag("<", TRUTH, ">")], "separator": ","}, "", True),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<t>", TRUTH, "!")], "at_least_one": True},
            "none",
            False,
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<t>", TRUTH, "!")], "stop_after_first": True},
            "a <t>true!",
            True,
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<t>", TRUTH, "!")], "stop_after_first": True},
            "a <t>true! b",
            False,
        ),
    ],
)
def test_formats_of_structural_tags(store, compile_grammar, format_, text, expected):
    assert admits(store, compile_grammar("structural_tag", {"format": format_}), text) is expected


def test_two_grammars_in_one_tag_keep_their_rules_apart(store, compile_grammar):
    parts = [{"type": "grammar", "grammar": f'root ::= item\nitem ::= "{word}"'} for word in ("one", "two")]
    compiled = compile_grammar("structural_tag", {"format": {"type": "sequence", "elements": parts}})
    assert admits(store, compiled, "onetwo")
    assert not admits(store, compiled, "oneone")


def test_a_special_token_in_a_tag_is_the_token_and_not_its_spelling(store, compile_grammar, end_token):
    tool = end_token + 1
    tags = [tag("<|tool|>call:", TRUTH, "")]
    compiled = compile_grammar(
        "structural_tag", {"format": {"type": "triggered_tags", "triggers": ["<|tool|>"], "tags": tags}}
    )
    assert admits(store, compiled, [*b"well ", tool, *b"call:true"])
    assert not admits(store, compiled, [*b"well ", tool, *b"call:x"])
    assert admits(store, compiled, [*b"the text <|tool|> is only text"])


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[" * 100_000, "too deep"),
        ("json_schema", "false", "nothing matches"),
        ("json_schema", '"string"', "object or a boolean"),
        ("json_schema", '{"type": "number", "minimum": NaN}', "NaN"),
        ("json_schema", '{"type": "number", "minimum": 1e999}', "out of range"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than maximum"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "string", "format": "color"}', "color"),
        ("json_schema", '{"$ref": "https://example.com/schema.json"}', "example.com"),
        ("json_schema", '{"type": "object", "minProperties": 2}', "minProperties"),
        ("regex", "", "empty"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "(" * 50_000 + "a" + ")" * 50_000, "."),
        ("ebnf", "", "empty"),
        ("ebnf", "root ::= missing", "missing"),
        ("ebnf", 'root = "a"', "Expected ::="),
        ("ebnf", "root ::= " + "(" * 50_000, "."),
        ("structural_tag", "[]", "JSON object"),
        ("structural_tag", '{"format": {"type": "sonnet"}}', "format.type is 'sonnet'"),
        ("structural_tag", '{"format": {"type": "tag", "content": {"type": "any_text"}}}', "format.begin"),
        ("structural_tag", '{"triggers": ["<a"], "structures": [{"begin": "<b"}]}', "none of the triggers"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(compile_grammar, kind, source, reason):
    with pytest.raises(GrammarError, match=re.escape(reason) if reason != "." else "."):
        compile_grammar(kind, source)


@pytest.mark.parametrize("schema", ENDLESS, ids=range(len(ENDLESS)))
def test_a_schema_that_no_finite_text_satisfies_is_refused(compile_grammar, schema):
    with pytest.raises(GrammarError, match="no end"):
        compile_grammar("json_schema", schema)


def test_lenient_ignores_what_cannot_be_enforced(store, compile_grammar):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert admits(store, compile_grammar("json_schema", schema, lenient=True), "[1,1]")


def test_options_inside_the_schema_are_not_its_authors_to_set(store, compile_grammar):
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        compile_grammar("json_schema", schema)


def test_keys_name_vocabulary_kind_text_and_options():
    base = GrammarSource("regex", "a+")
    others = [
        GrammarSource("ebnf", "a+"),
        GrammarSource("regex", "a*"),
        GrammarSource("regex", "a+", GrammarOptions(any_whitespace=False)),
        GrammarSource("regex", "a+", GrammarOptions(lenient=True)),
    ]
    keys = {source.key(b"v" * 16) for source in (base, *others)} | {base.key(b"w" * 16)}
    assert len(keys) == 6
    assert base.key(b"v" * 16) == GrammarSource("regex", "a+").key(b"v" * 16)


def test_compiling_twice_gives_the_same_bytes(json_schemas, compile_grammar):
    for schema in list(json_schemas.values())[:10]:
        assert compile_grammar("json_schema", schema) == compile_grammar("json_schema", schema)


def test_an_artefact_survives_its_bytes_and_damage_is_noticed():
    artefact = GrammarArtefact.of(GrammarSource("regex", "é", salt="mine"), b"f" * 16, 'start: "é"')
    raw = artefact.to_bytes()
    assert GrammarArtefact.from_bytes(raw) == artefact
    for damaged in (b"", raw[:20], raw[:-1], raw[:-1] + b"x", b"????" + raw[4:], raw + b" "):
        with pytest.raises(ArtefactError):
            GrammarArtefact.from_bytes(damaged)


def test_a_builder_can_be_used_again_after_an_error():
    builder = GrammarBuilder(())
    with pytest.raises(GrammarError):
        builder.compile(GrammarSource("regex", "("))
    assert "a+" in builder.compile(GrammarSource("regex", "a+"))
