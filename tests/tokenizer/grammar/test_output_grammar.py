"""Grammars of calls: what they admit is what the parsers read, in every family."""

from __future__ import annotations

import json
import random

import llguidance
import pytest

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.compile import GrammarBuilder, parser_limits
from sapwood_common.grammar.source import GrammarOptions, GrammarSource
from sapwood_text.incremental.events import ReasoningDelta, TextDelta, ToolCallStart
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.reasoning_parser import registry as reasoning_registry
from sapwood_text.tool_parser.registry import NAMES
from sapwood_text.tool_parser.tools import Tools
from sapwood_tokenizer.grammar.families import GENERIC_PARSER
from sapwood_tokenizer.grammar.source import CallsWanted, ModelFormat, output_source

WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "near": {"$ref": "#/$defs/near"},
        "exact": {"type": "boolean"},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"near": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 2}},
}
TIMER = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}, "of": {"type": "null"}},
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "timer": TIMER, "stop-all": {"type": "object", "additionalProperties": False}}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
        {"type": "function", "function": {"name": "timer", "parameters": TIMER}},
        {"type": "function", "function": {"name": "stop-all"}},
    ]
)
PLAIN = ModelFormat("", frozenset())
V3 = ModelFormat('"```json" tools', frozenset())
FAMILIES = [*((name, PLAIN) for name in NAMES), ("deepseek", V3), ("", PLAIN)]
ANSWER = GrammarSource("json_schema", '{"type": "integer", "maximum": 50, "minimum": 0}')


def wanted(parser: str, **fields) -> CallsWanted:
    return CallsWanted(
        **{"tools": TOOLS, "name": "", "required": True, "parallel": True, "tool_parser": parser, **fields}
    )


class Grammar:
    """A grammar over single bytes and special tokens."""

    def __init__(self, source: GrammarSource, special: tuple[str, ...] = ()) -> None:
        builder = GrammarBuilder(special)
        lark = builder.compile(source)
        self.matcher = llguidance.LLMatcher(builder._tokenizer, lark, log_level=0, limits=parser_limits())

    def admits(self, text: str) -> bool:
        self.matcher.reset()
        return (
            self.matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and self.matcher.is_accepting()
        )

    def write(self, chance: random.Random, limit: int = 3000) -> str:
        """A text at random; JSON's white space is seldom taken."""
        self.matcher.reset()
        written = bytearray()
        while not self.matcher.is_stopped() and len(written) < limit:
            mask = self.matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
            if not allowed or (self.matcher.is_accepting() and chance.random() < 0.5):
                break
            tight = [byte for byte in allowed if byte not in b" \r\n\t"]
            byte = chance.choice(tight if tight and chance.random() < 0.9 else allowed)
            assert self.matcher.consume_token(byte)
            written.append(byte)
        assert self.matcher.is_accepting(), written
        return written.decode()


def parse(
    text: str, parser: str, reasoning: str = "", opened: bool | None = None, tools: str = TOOLS
) -> tuple[str, str, list]:
    """Text, reasoning and calls."""
    output = OutputParser(ParserOptions(parser, reasoning, opened, Tools.from_json(tools), "seed"))
    plain, thoughts, calls = "", "", []
    for event in [*output.feed(text), *output.finish()]:
        if isinstance(event, TextDelta):
            plain += event.text
        elif isinstance(event, ReasoningDelta):
            thoughts += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        else:
            calls[-1][1] += event.fragment
    return plain, thoughts, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("family", "model"), FAMILIES)
def test_whatever_a_grammar_of_calls_admits_is_read_as_calls(family: str, model: ModelFormat) -> None:
    from jsonschema import validate  # takes seconds

    source, parser = output_source(None, wanted(family), "", None, model)
    assert parser == (family or GENERIC_PARSER)
    grammar = Grammar(source)
    seen, most = set(), 0
    for seed in range(60):
        text = grammar.write(random.Random(seed))
        plain, _, calls = parse(text, parser)
        assert not plain.strip(), text
        assert calls, text
        most = max(most, len(calls))
        for name, arguments in calls:
            seen.add(name)
            validate(arguments, SCHEMAS[name])
    assert seen == set(SCHEMAS)
    assert (most > 1) == (family != "gpt_oss")


@pytest.mark.parametrize(("family", "model"), FAMILIES)
def test_one_named_tool_is_called_once(family: str, model: ModelFormat) -> None:
    source, parser = output_source(None, wanted(family, name="timer", parallel=False), "", None, model)
    grammar = Grammar(source)
    for seed in range(10):
        text = grammar.write(random.Random(seed))
        assert [name for name, _ in parse(text, parser)[2]] == ["timer"], text


@pytest.mark.parametrize(("family", "model"), FAMILIES)
def test_calls_on_offer_leave_the_text_free_and_an_answer_has_its_own_grammar(family: str, model: ModelFormat) -> None:
    head = "<|channel|>final<|message|>" if family == "gpt_oss" else ""
    calls, _ = output_source(None, wanted(family), "", None, model)
    call = Grammar(calls).write(random.Random(3))
    free = Grammar(output_source(None, wanted(family, required=False), "", None, model)[0])
    assert free.admits(f"{head}It is {{sunny}}, [see].")
    assert free.admits(call)
    either = Grammar(output_source(ANSWER, wanted(family, required=False), "", None, model)[0])
    assert either.admits(f"{head}42")
    assert either.admits(call)
    assert not either.admits(f"{head}It is sunny.")
    assert not either.admits(f"{head}51")


def test_what_is_no_call_of_a_tool_on_offer_is_not_admitted() -> None:
    grammar = Grammar(output_source(None, wanted("hermes", required=False), "", None, PLAIN)[0])
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert grammar.admits("Now. " + call % ("weather", '{"unit": "kelvin", "days": 3}') + " So.")
    assert not grammar.admits(call % ("weather", '{"unit": "ells", "days": 3}'))
    assert not grammar.admits(call % ("weather", '{"unit": "kelvin"}'))
    assert not grammar.admits(call % ("rain", "{}"))
    required = Grammar(output_source(None, wanted("hermes"), "", None, PLAIN)[0])
    assert not required.admits("")
    assert not required.admits("Now. " + call % ("timer", "{}"))
    assert required.admits(call % ("timer", "{}") + "\n" + call % ("stop-all", "{}"))


STRINGS = json.dumps(
    [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}}}]
)
WITH_STRINGS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=s>\na <b> {c\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a <b> {c</arg_value>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"s": "a <b> {c"}}\n</tool_call>',
    "pythonic": '[f(s="a <b> {c")]',
    "gemma4": '<|tool_call>call:f{s:<|"|>a <b> {c<|"|>}<tool_call|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a <b> {c</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">a <b> {c'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
}


@pytest.mark.parametrize("family", WITH_STRINGS)
def test_strings_are_written_as_the_family_writes_them(family: str) -> None:
    source, parser = output_source(None, wanted(family, tools=STRINGS), "", None, PLAIN)
    assert Grammar(source).admits(WITH_STRINGS[family])
    assert parse(WITH_STRINGS[family], parser, tools=STRINGS)[2] == [("f", {"s": "a <b> {c"})]


@pytest.mark.parametrize("name", [name for name in reasoning_registry.NAMES if name != "gpt_oss"])
def test_an_answers_grammar_begins_after_the_reasoning(name: str) -> None:
    family = reasoning_registry.reasoning_family(name)
    thoughts = f"Is it 7? {{or}} 9.{family.closing}"
    opened = Grammar(output_source(ANSWER, None, name, True, PLAIN)[0])
    assert opened.admits(f"{thoughts}\n\n42")
    assert not opened.admits("42")
    assert parse(f"{thoughts}\n\n42", "", name, True)[:2] == ("42", "Is it 7? {or} 9.")
    closed = Grammar(output_source(ANSWER, None, name, False, PLAIN)[0])
    assert closed.admits("42")
    assert not closed.admits(f"{thoughts}42")
    unknown = Grammar(output_source(ANSWER, None, name, None, PLAIN)[0])
    assert unknown.admits(f"{thoughts}42" if family.starts_open else f"{family.opening}{thoughts}42")
    assert unknown.admits("42") != family.starts_open


def test_gpt_oss_reasons_and_then_answers_or_calls() -> None:
    special = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    model = ModelFormat("", frozenset(special))
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text = thoughts + "<|channel|>final<|message|>42"
    for names in ((), special):
        source, _ = output_source(ANSWER, None, "gpt_oss", None, model)
        assert (not names) == Grammar(source, names).admits(text)  # where they are tokens, no text is one
    assert parse(text, "", "gpt_oss")[:2] == ("42", "Hm.")
    source, parser = output_source(None, wanted("gpt_oss"), "gpt_oss", None, PLAIN)
    text = thoughts + "<|channel|>commentary to=functions.timer <|constrain|>json<|message|>{}"
    assert Grammar(source).admits(text)
    assert parse(text, parser, "gpt_oss") == ("", "Hm.", [("timer", {})])


@pytest.mark.parametrize("kind", ["regex", "ebnf", "structural_tag"])
def test_every_kind_of_grammar_follows_reasoning(kind: str) -> None:
    text = {
        "regex": "[0-9]+",
        "ebnf": 'root ::= "4" two\ntwo ::= "2"',
        "structural_tag": '{"triggers": ["<n>"], "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}]}',
    }[kind]
    source, _ = output_source(GrammarSource(kind, text, GrammarOptions()), None, "qwen3", True, PLAIN)
    grammar = Grammar(source)
    assert grammar.admits("a</think>" + ("x<n>42</n>" if kind == "structural_tag" else "42"))
    assert not grammar.admits("a</think>" + ("x<n>a</n>" if kind == "structural_tag" else "x"))


def test_marks_that_no_grammar_can_spell() -> None:
    special = ModelFormat("", frozenset({"[TOOL_CALLS]", "[/THINK]"}))
    assert output_source(None, wanted("mistral"), "", None, special)[1] == GENERIC_PARSER
    with pytest.raises(InvalidArgumentError) as caught:
        output_source(ANSWER, None, "mistral", True, special)
    assert caught.value.field == "reasoning_parser"


@pytest.mark.parametrize(
    ("tools", "name", "field"),
    [
        ("[", "", "tool_calls.tools"),
        ("[]", "", "tool_calls.tools"),
        (TOOLS, "rain", "tool_calls.name"),
        ('[{"function": {"name": "a b"}}]', "", "tool_calls.tools[0].function.name"),
        ('[{"function": {"name": "f", "parameters": 1}}]', "", "tool_calls.tools[0].function.parameters"),
    ],
)
def test_a_wrong_tool_is_named(tools: str, name: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        output_source(None, wanted("hermes", tools=tools, name=name), "", None, PLAIN)
    assert caught.value.field == field
