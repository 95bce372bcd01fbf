"""What the engine admits, jsonschema admits: bounds enumerated at random, with texts around each bound."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pytest

from sapwood_common.grammar.compile import GrammarBuilder, parser_limits
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.source import GrammarSource
from sapwood_worker.model.grammar.bounded_process import BoundedProcesses, ProcessDiedError, TimeUpError
from sapwood_worker.model.grammar.xgrammar import _compile, start, tokenizer_info

BOUNDS = [
    -10,
    -9.99,
    -3,
    -2,
    -1.5,
    -1,
    -0.5,
    -0.1,
    -0.001,
    0,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    1.5,
    2,
    3,
    9.5,
    10,
    10.01,
    99,
    100,
]
STEPS = [0, 1e-3, -1e-3, 0.1, -0.1, 0.5, -0.5, 1, -1, 1e-7, -1e-7]
TEXTS = sorted({repr(round(bound + step, 9)) for bound in BOUNDS for step in STEPS})
NUMBERS = [text for text in TEXTS if "e" not in text]
NUMBERS += [text + "0" for text in NUMBERS if "." in text] + [text[:-2] for text in NUMBERS if text.endswith(".0")]
NUMBERS += ["-0", "-0.0", "1e1", "1E2", "1e-1", "-1e0", "0e0", "1.0e0", "0.00000001", "-0.00000001"]
SCALARS = [0, 1, 2, 1.5, "a", "b", "ab", "", None, True, False]
WORDS = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aa",
    "abc",
    "é",
    "éé",
    "😀",
    "a\n",
    "\n",
    'a"',
    "\\",
    "1",
    "12",
    " ",
    "A",
    "aaaa",
    "a_1",
]
EXPRESSIONS = [
    "^a",
    "b$",
    "a",
    "^ab?$",
    "^a|b$",
    "^(a|b)+$",
    "^[0-9]+$",
    "^.$",
    "^[^a]*$",
    "^$",
    "",
    "a*",
    "(^a)|(b$)",
    "x{2,3}",
]


@pytest.fixture(scope="module")
def builder() -> GrammarBuilder:
    return GrammarBuilder(())


def wrongly_admitted(builder: GrammarBuilder, schema: dict[str, Any], texts: list[str]) -> list[str]:
    """The texts that the engine admits and jsonschema does not; none where the schema is refused."""
    try:
        lark = builder.compile(GrammarSource("json_schema", json.dumps(schema)))
    except GrammarError:
        return []
    matcher = llguidance.LLMatcher(builder._tokenizer, lark, log_level=0, limits=parser_limits())
    validator = jsonschema.Draft202012Validator(schema)
    found = []
    for text in texts:
        matcher.reset()
        tokens = list(text.encode())
        admitted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        if admitted and not validator.is_valid(json.loads(text)):
            found.append(text)
    return found


@pytest.fixture(scope="module")
def other_engine() -> Any:
    """Compiles a schema with the library of ``--grammar-backend xgrammar``, over a vocabulary of bytes."""
    xgrammar = pytest.importorskip("xgrammar")
    info = tokenizer_info([bytes([value]) for value in range(256)] + [b""], [256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(schema: dict[str, Any]) -> Callable[[str], bool] | None:
        try:
            grammar = _compile(compiler, GrammarSource("json_schema", json.dumps(schema)), [])
        except (GrammarError, RuntimeError):
            return None

        def admits(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
            return bool(matcher.accept_string(text) and matcher.is_terminated())

        return admits

    return compiled


def number(chance: random.Random) -> dict[str, Any]:
    bounds = chance.sample(BOUNDS, 2)  # often next to each other
    schema: dict[str, Any] = {"type": chance.choice(["number", "number", "integer"])}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if chance.random() < 0.45:
            schema[key] = chance.choice(bounds)
    if chance.random() < 0.1:
        schema["multipleOf"] = chance.choice([1, 2, 0.5, 0.25, 3])
    return schema


def string(chance: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for key, share in (("minLength", 0.4), ("maxLength", 0.4)):
        if chance.random() < share:
            schema[key] = chance.choice([0, 1, 2, 3])
    if chance.random() < 0.6:
        schema["pattern"] = chance.choice(EXPRESSIONS)
    if chance.random() < 0.15:
        schema["enum"] = chance.sample(WORDS, 3)
    return schema


def scalar(chance: random.Random) -> Any:
    return chance.choice(
        [
            {"type": "integer"},
            {"type": "string", "maxLength": 1},
            {"enum": [1, "a", None]},
            {"const": 1},
            True,
            False,
            {},
        ]
    )


def array(chance: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    for key in ("minItems", "maxItems"):
        if chance.random() < 0.5:
            schema[key] = chance.choice([0, 1, 2, 3])
    if chance.random() < 0.6:
        schema["items"] = scalar(chance)
    if chance.random() < 0.4:
        schema["prefixItems"] = [scalar(chance) for _ in range(chance.choice([1, 2]))]
    return schema


def object_(chance: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if chance.random() < 0.7:
        schema["properties"] = {key: scalar(chance) for key in chance.sample("abc", chance.choice([1, 2, 3]))}
    if chance.random() < 0.5:
        schema["required"] = chance.sample("abcd", chance.choice([1, 2]))
    if chance.random() < 0.5:
        schema["additionalProperties"] = scalar(chance)
    if chance.random() < 0.2:
        schema["patternProperties"] = {chance.choice(["^a", "^[bc]$", "d"]): scalar(chance)}
    for key in ("minProperties", "maxProperties"):
        if chance.random() < 0.2:
            schema[key] = chance.choice([0, 1, 2])
    return schema


def texts_of(chance: random.Random, kind: str) -> list[str]:
    match kind:
        case "number":
            return NUMBERS
        case "string":
            return [json.dumps(word) for word in WORDS] + [json.dumps(word, ensure_ascii=False) for word in WORDS]
        case "array":
            lists = [[chance.choice(SCALARS) for _ in range(length)] for length in (0, 1, 1, 1, 2, 2, 2, 3, 3, 4) * 5]
            return [json.dumps(items) for items in lists]
    names = [chance.sample("abcde", count) for count in (0, 1, 1, 1, 2, 2, 2, 3, 3, 4) * 5]
    return [json.dumps({name: chance.choice(SCALARS) for name in sorted(chosen)}) for chosen in names]


@pytest.mark.parametrize("kind", ["number", "string", "array", "object"])
def test_xgrammar_admits_no_text_outside_of_a_schemas_bounds(other_engine: Any, kind: str) -> None:
    make = {"number": number, "string": string, "array": array, "object": object_}[kind]
    chance = random.Random(7)
    right = 0
    for _ in range(100):
        schema = make(chance)
        texts = texts_of(chance, kind)
        admits = other_engine(schema)
        if admits is None:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        admitted = [text for text in texts if admits(text)]
        assert [text for text in admitted if not validator.is_valid(json.loads(text))] == [], schema
        right += len(admitted)
    assert right > 100, "it admits what the schemas allow"


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(10**40), "maximum": 10**40},
        {"type": "number", "exclusiveMinimum": 1e308, "maximum": 1.7e308},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "maxLength": 2**63},
        {"type": "array", "minItems": 10**7, "maxItems": 10**8},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"type": "string", "pattern": "(" * 5000 + ")" * 5000},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"properties": {f"p{number}": {"anyOf": [{"const": value} for value in range(50)]} for number in range(200)}},
        {"enum": [{"a": [[]] * 50}] * 500},
    ],
    ids=["integers", "numbers", "long", "longest", "items", "repeats", "deep", "circle", "wide", "enum"],
)
def test_hostile_schemas_end_in_time_with_xgrammar(schema: dict[str, Any]) -> None:
    """Each in the bounded process, as requests have it: compiled, or refused by name."""
    pytest.importorskip("xgrammar")
    tokens = [bytes([value]) for value in range(256)] + [b""]
    settings = {"tokens": [token.decode("latin-1") for token in tokens], "ends": [256], "special": []}
    processes = BoundedProcesses(f"{start.__module__}:{start.__name__}", json.dumps(settings).encode(), 10.0)
    try:
        answer = processes.call(json.dumps(["json_schema", json.dumps(schema), True, False]).encode())
        assert answer[:1] in (b"+", b"-")
    except (TimeUpError, ProcessDiedError):
        pass  # the request is refused
    finally:
        processes.close()


@pytest.mark.parametrize(("kind", "count"), [("number", 150), ("string", 150), ("array", 150), ("object", 150)])
def test_no_text_outside_of_a_schemas_bounds_is_admitted(builder: GrammarBuilder, kind: str, count: int) -> None:
    make = {"number": number, "string": string, "array": array, "object": object_}[kind]
    chance = random.Random(5)
    for _ in range(count):
        schema = make(chance)
        if chance.random() < 0.2:
            schema = {"allOf": [schema, make(chance)]}
        assert wrongly_admitted(builder, schema, texts_of(chance, kind)) == [], schema


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.49"], ["0", "0.0", "-0", "0.5", "1"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.01", "1.5"], ["1", "1.0", "1.6", "2"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.2"], ["-1", "-1.0", "-0.5", "-2"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-0.0", "0.1"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        ({"exclusiveMinimum": 0}, ["0.1", "7", "100.5"], ["0", "-1"]),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 5}, ["2.5", "3", "4.99"], ["2", "2.0", "5", "5.0"]),
    ],
)
def test_an_exclusive_whole_bound_is_kept(
    builder: GrammarBuilder, schema: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    lark = builder.compile(GrammarSource("json_schema", json.dumps({"type": "number", **schema})))
    matcher = llguidance.LLMatcher(builder._tokenizer, lark, log_level=0, limits=parser_limits())

    def admits(text: str) -> bool:
        matcher.reset()
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    assert list(filter(admits, (*inside, *outside))) == inside
