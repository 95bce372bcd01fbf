"""Right outputs, damaged at random: no rule of the parsers breaks. docs/parsers.md says how to try many more."""

import random
import sys
from collections.abc import Callable

import pytest

from sapwood_testing.damaged_calls import cases, check, make_case, parse, parsers
from sapwood_text.output_parser import ParserOptions
from sapwood_text.tool_parser.registry import NAMES
from sapwood_text.tool_parser.tools import Tools

CASES = 3000
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_breaks_a_rule(part: int) -> None:
    broken = [
        (parser, number, fault)
        for index, (parser, number) in enumerate(cases(CASES))
        if index % PARTS == part and (fault := check(make_case(parser, number, seed=7)))
    ]
    assert broken == []


def test_every_parser_is_damaged() -> None:
    assert {parser for parser, _ in cases(CASES)} == set(parsers())


def calls_to_read(options: ParserOptions, pieces: list[str]) -> int:
    """How many calls of Python functions it takes to parse an output."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        parse(options, pieces)
    finally:
        sys.setprofile(None)
    return count


QWEN_CALL = "<tool_call>\n<function=f>\n<parameter=a>\nv"
HARD: dict[str, tuple[str, Callable[[int], str]]] = {
    "calls that are cut": ("qwen3_coder", lambda n: (QWEN_CALL + "\n") * n),
    "calls in a value": ("qwen3_coder", lambda n: QWEN_CALL + (QWEN_CALL + "\n</parameter>\n</function>\n") * n),
    "end tags in a value": ("qwen3_coder", lambda n: QWEN_CALL + "</parameter> x" * n),
    "doubled end tags": ("qwen3_coder", lambda n: QWEN_CALL + "</parameter>" * n),
    "ends of calls in a value": ("qwen3_coder", lambda n: QWEN_CALL + "</function> x" * n + "</parameter></function>"),
    "parameters in a value": ("qwen3_coder", lambda n: QWEN_CALL + "<parameter=a>" * n),
    "new parameters in a value": (
        "qwen3_coder",
        lambda n: QWEN_CALL + "".join(f"<parameter=b{index}>w" for index in range(n)),
    ),
    "pairs of parameters": ("qwen3_coder", lambda n: QWEN_CALL + "<parameter=b>w</parameter> x" * n),
    "closing tags of other kinds": ("qwen3_coder", lambda n: QWEN_CALL + "</parram></p>" * n),
    "keys of GLM": ("glm45", lambda n: "<tool_call>f" + "<arg_key>a</arg_key>" * n),
    "openers of GLM": ("glm45", lambda n: "<tool_call>" * n + "<arg_key>" * n),
    "strings that are cut": ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": {"a": "x' * n),
    "markers in a string": ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * n),
    "openers": ("hermes", lambda n: "<tool_call>" * n),
    "open brackets": ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": ' + '{"a": [' * n),
    "brackets that close nothing": ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": ' + "[" * n + "}" * n),
    "objects in a list": ("mistral", lambda n: "[TOOL_CALLS][" + '{"a": 1},' * n),
    "arguments before the name": ("hermes", lambda n: '<tool_call>{"arguments": [' + "1," * n + '], "name": "f"}'),
    "lines of calls": ("llama3_json", lambda n: '{"name": "f", "parameters": {"a": "x\n' * n),
    "separators of calls": ("llama3_json", lambda n: '{"name": "f", "parameters": {}}; ' * n),
    "words of Gemma": ("gemma4", lambda n: "<|tool_call>call:f{a:" + "b, " * n),
    "quotes of Gemma": ("gemma4", lambda n: "<|tool_call>call:f{a:" + '<|"|> ' * n),
    "keywords": ("pythonic", lambda n: "[f(" + "a=[1], " * n),
    "headers": ("gpt_oss", lambda n: "<|channel|>commentary to=functions.f" * n),
    "drafts": ("hermes", lambda n: "<think>" + '<tool_call>{"name": "f"}</tool_call>' * n),
    "drafts that are cut": ("hermes", lambda n: "<think>" + '<tool_call>{"name": "f", "arguments": {"a": "x' * n),
    "texts about calls": ("hermes", lambda n: "<think>" + "<tool_call> is. " * n),
}


@pytest.mark.parametrize("name", sorted(HARD))
def test_work_grows_with_the_output_and_no_faster(name: str) -> None:
    family, make = HARD[name]
    options = ParserOptions(tool_parser=family, reasoning_parser="" if family == "gpt_oss" else "qwen3")
    chance = random.Random(name)

    def pieces_of(make: Callable[[int], str], count: int) -> list[str]:
        text, pieces = make(count), []
        while text:
            size = chance.randint(1, 40)
            pieces.append(text[:size])
            text = text[size:]
        return pieces

    small, large = (calls_to_read(options, pieces_of(make, count)) for count in (40, 160))
    assert large < 6 * small
    assert calls_to_read(options, [make(160)]) < 6 * calls_to_read(options, [make(40)]) + 1000


@pytest.mark.parametrize("parser", NAMES)
def test_cuts_do_not_matter_where_tools_are_unknown(parser: str) -> None:
    options = ParserOptions(parser, tools=Tools())
    for number in range(20):
        text = make_case(parser, number, seed=8).text
        assert parse(options, [text]) == parse(options, list(text))
