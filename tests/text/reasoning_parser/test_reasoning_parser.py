"""Reasoning between tags, alone and before tool calls, however the output is cut."""

import pytest

from sapwood_common.errors import InvalidArgumentError
from sapwood_text.incremental.events import ReasoningDelta, TextDelta
from sapwood_text.output_parser import OutputParser, ParserOptions
from sapwood_text.reasoning_parser.registry import detect_reasoning_parser, ends_in_reasoning

# (family, starts open, output, reasoning, text)
EXAMPLES = [
    ("deepseek_r1", None, "I think.\n</think>\n\nAnswer.", "I think.", "Answer."),
    ("deepseek_r1", None, "<think>\nI think.\n</think>\n\nAnswer.\n", "I think.", "Answer.\n"),
    ("deepseek_r1", None, "no end in sight", "no end in sight", ""),
    ("deepseek_r1", False, "Answer.", "", "Answer."),
    ("deepseek_r1", None, "</think>Answer", "", "Answer"),
    ("deepseek_r1", None, "a </thin b </think>c</think>d", "a </thin b", "cd"),
    ("deepseek_r1", None, "a</think>\n</think>\nb `</think>` c", "a", "b `</think>` c"),
    ("qwen3", None, "<think><think>a</think>b", "a", "b"),
    ("qwen3", False, "a</think>b", "", "ab"),
    ("gemma4", None, "<|channel>thought\nr\n<channel|>A", "r", "A"),
    ("gemma4", None, "<|channel>thought\n<channel|>A", "", "A"),
    (
        "cohere",
        None,
        "<|START_THINKING|>r<|END_THINKING|><|START_RESPONSE|>A<|END_RESPONSE|>",
        "r",
        "A",
    ),
    ("deepseek_v3", True, "x</think>y", "x", "y"),
    ("deepseek_v3", None, "x", "", "x"),
    ("qwen3", None, "<think>\n\n</think>\n\nHello", "", "Hello"),
    (
        "qwen3",
        None,
        "\n<think>two\n\nparts </think> Hello <think>no</think>",
        "two\n\nparts",
        "Hello <think>no</think>",
    ),
    ("qwen3", None, " Hello, the <think> tag", "", " Hello, the <think> tag"),
    ("qwen3", None, "<think", "", "<think"),
    ("qwen3", True, "a</think>b", "a", "b"),
    ("glm45", None, "\n<think>r</think>\nA", "r", "A"),
    ("kimi", None, "◁think▷r◁/think▷A", "r", "A"),
    ("kimi_k2", None, "<think>r</think>A", "r", "A"),
    ("mistral", None, "[THINK]r[/THINK]A", "r", "A"),
    ("cohere", None, "<|START_THINKING|>r<|END_THINKING|>A", "r", "A"),
    (
        "gpt_oss",
        None,
        "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>",
        "r",
        "A",
    ),
    (
        "gpt_oss",
        None,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d",
        "a\nb",
        "c\nd",
    ),
]


@pytest.mark.parametrize(("family", "is_open", "output", "reasoning", "text"), EXAMPLES)
def test_reasoning_and_answer_are_told_apart_however_the_output_is_cut(
    family, is_open, output, reasoning, text, parse_every_way
):
    parsed = parse_every_way(ParserOptions(reasoning_parser=family, reasoning_open=is_open), output)
    assert (parsed.reasoning, parsed.text, parsed.tool_calls) == (reasoning, text, ())


def test_calls_are_looked_for_in_the_answer_only(parse_every_way):
    call = '<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>'
    output = f"<think>maybe {call}?</think>\n\nSo:\n{call}"
    parsed = parse_every_way(ParserOptions(tool_parser="hermes", reasoning_parser="qwen3"), output)
    assert parsed.reasoning == f"maybe {call}?"
    assert parsed.text == "So:"
    assert [(found.name, found.arguments) for found in parsed.tool_calls] == [("f", '{"x": "<think>"}')]


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
CODER_CALL = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("tool_parser", "call"), [("hermes", CALL), ("qwen3_coder", CODER_CALL)])
@pytest.mark.parametrize("between", ["", "\n", " and ", CALL[:11] + " is a tag.\n"])
def test_a_whole_call_that_ends_the_output_inside_reasoning_is_made(tool_parser, call, between, parse_every_way):
    options = ParserOptions(tool_parser=tool_parser, reasoning_parser="qwen3", reasoning_open=True)
    parsed = parse_every_way(options, f"I call.{between}{call}\n{call}")
    assert parsed.reasoning == f"I call.{between}".strip()
    assert [(found.name, found.arguments) for found in parsed.tool_calls] == [("f", '{"x": 1}')] * 2
    assert parsed.text == ""


@pytest.mark.parametrize(
    "output",
    [
        f"Maybe {CALL}?</think>No.",
        f"{CALL}\n</think>No.",
        f"{CALL}{CALL}</think></think>No.",
    ],
)
def test_a_drafted_call_that_the_end_of_reasoning_follows_stays_reasoning(output, parse_every_way):
    options = ParserOptions(tool_parser="hermes", reasoning_parser="qwen3", reasoning_open=True)
    parsed = parse_every_way(options, output)
    assert parsed.tool_calls == ()
    assert parsed.text == "No."
    assert "<tool_call>" in parsed.reasoning


@pytest.mark.parametrize("ending", [CALL[:-20], CALL + " I think that" + " it is right" * 100, "<tool_call> is a tag"])
def test_a_cut_call_or_one_that_thoughts_follow_stays_reasoning(ending, parse_every_way):
    options = ParserOptions(tool_parser="hermes", reasoning_parser="qwen3", reasoning_open=True)
    parsed = parse_every_way(options, f"So {ending}")
    assert (parsed.reasoning, parsed.text, parsed.tool_calls) == (f"So {ending}", "", ())


def test_text_about_calls_in_reasoning_is_released_at_once():
    parser = OutputParser(ParserOptions(tool_parser="hermes", reasoning_parser="qwen3", reasoning_open=True))
    assert parser.feed("The <tool_call>") == [ReasoningDelta("The")]
    assert parser.feed(" tag opens") == [ReasoningDelta(" <tool_call> tag opens")]


def test_kimi_may_call_without_closing_its_reasoning(parse_every_way):
    output = (
        "<think>I call.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    parsed = parse_every_way(ParserOptions(tool_parser="kimi_k2", reasoning_parser="kimi_k2"), output)
    assert parsed.reasoning == "I call."
    assert [call.id for call in parsed.tool_calls] == ["functions.f:0"]
    assert parsed.text == ""


def test_reasoning_is_released_at_once():
    parser = OutputParser(ParserOptions(reasoning_parser="qwen3"))
    assert parser.feed("<think>") == []
    assert parser.feed("\nLet me") == [ReasoningDelta("Let me")]
    assert parser.feed(" see </t") == [ReasoningDelta(" see")]
    assert parser.feed("his") == [ReasoningDelta(" </this")]
    assert parser.feed("</think>A ") == [TextDelta("A ")]
    assert parser.finish() == []


def test_one_name_is_enough_for_gpt_oss(parse):
    output = "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    by_tool = parse(ParserOptions(tool_parser="gpt_oss"), [output])
    assert by_tool == parse(ParserOptions(reasoning_parser="gpt_oss"), [output])
    assert by_tool == parse(ParserOptions(tool_parser="gpt_oss", reasoning_parser="gpt_oss"), [output])
    assert by_tool.reasoning == "r" and by_tool.tool_calls[0].name == "f"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ParserOptions(tool_parser="nope"), "tool_parser"),
        (ParserOptions(reasoning_parser="nope"), "reasoning_parser"),
        (ParserOptions(tool_parser="hermes", reasoning_parser="gpt_oss"), "tool_parser"),
        (ParserOptions(tool_parser="gpt_oss", reasoning_parser="qwen3"), "reasoning_parser"),
    ],
)
def test_unknown_and_unfit_names_are_refused_with_the_field(options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        OutputParser(options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("[/INST][THINK]", "", True),
        ("<|im_start|>assistant\n", "", None),
        ("assistant\n<think>\nSo far", "<think>\nSo far", True),
        ("assistant\n<think>a</think> So far", "<think>a</think> So far", False),
        ("user\n<think> assistant\nSo far", "So far", None),
    ],
)
def test_a_prompt_tells_whether_the_output_begins_inside_reasoning(prompt, continued, inside):
    assert ends_in_reasoning(prompt, continued) is inside


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("<|im_start|>assistant {{ '<think>\n' }}", "qwen3"),
        ("{{- '[|assistant|]\n' }}{% if enable_thinking %}{{- '<think>\n' }}", "qwen3"),
        ("{{- '<|endofturn|>\n<|assistant|>\n<think>\n' }}", "qwen3"),
        ("{{- ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}", "minimax_m2"),
        ("{% if thinking %}<｜Assistant｜><think>{% else %}</think>", "deepseek_v3"),
        ("{{ content.split('</think>')[-1] }}<｜Assistant｜>", "deepseek_r1"),
        ("<tool_call><arg_key><think>", "glm45"),
        ("◁think▷", "kimi"),
        ("<|start|><|channel|>", "gpt_oss"),
        ("<|im_start|>assistant", ""),
        ("", ""),
    ],
)
def test_a_chat_template_tells_its_family(template, family):
    assert detect_reasoning_parser(template) == family
