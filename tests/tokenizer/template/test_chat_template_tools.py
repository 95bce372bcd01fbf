"""Tools, tool calls and continued messages in chat templates, compared with transformers' rendering of the same."""

import pytest

from sapwood.v1.common_pb2 import ChatMessage, ToolCall
from sapwood_common.errors import InvalidArgumentError
from sapwood_text.tool_parser.tools import load_tools
from sapwood_tokenizer.serve.chat_messages import CallArguments, to_messages
from sapwood_tokenizer.template.chat_template import ChatTemplate

TEMPLATE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.name %}({{ m.name }}){% endif %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.content is not none %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<call {{ call.id }}>{{ call.function | tojson }}{% endfor %}
{%- if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TRIMMING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
TOOLS = '[{"type": "function", "function": {"name": "f", "description": "<b> é", "parameters": {"type": "object"}}}]'
CONVERSATION = [
    ChatMessage(role="system", content=""),
    ChatMessage(role="user", content="Weather?", name="ann"),
    ChatMessage(
        role="assistant",
        reasoning="I look.",
        tool_calls=[ToolCall(id="c1", name="f", arguments='{"x": [1, "é"]}'), ToolCall(id="c2", name="g")],
    ),
    ChatMessage(role="tool", content="sun", tool_call_id="c1"),
    ChatMessage(role="assistant", content="It is  "),
]


def by_transformers(template, messages, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **options)
    return rendered[0]


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("template", [TEMPLATE, TRIMMING])
@pytest.mark.parametrize("tools", ["", TOOLS])
def test_a_conversation_with_tools_renders_as_by_transformers(template, continued, tools):
    messages = to_messages(CONVERSATION)
    ours = ChatTemplate(template, {}).render(
        messages, add_generation_prompt=not continued, tools=load_tools(tools), continue_final_message=continued
    )
    # Theirs writes content that is not there as None.
    filled = [{**message, "content": message["content"] or ""} for message in messages]
    assert ours == by_transformers(
        template,
        filled if template is TRIMMING else messages,
        add_generation_prompt=not continued,
        tools=load_tools(tools) or None,
        continue_final_message=continued,
    )


def test_all_parts_of_a_conversation_reach_the_template():
    text = ChatTemplate(TEMPLATE, {}).render(
        to_messages(CONVERSATION), add_generation_prompt=True, tools=load_tools(TOOLS)
    )
    assert text == (
        '<tools>{"type": "function", "function": {"name": "f", "description": "<b> é", '
        '"parameters": {"type": "object"}}}</tools>\n'
        "<|system|><|end|>\n<|user|>(ann)Weather?<|end|>\n"
        '<|assistant|><think>I look.</think><call c1>{"name": "f", "arguments": {"x": [1, "é"]}}'
        '<call c2>{"name": "g", "arguments": {}}<|end|>\n'
        "<|tool|>sun[c1]<|end|>\n<|assistant|>It is  <|end|>\n<|assistant|>"
    )


def test_a_continued_message_ends_the_prompt():
    text = ChatTemplate(TEMPLATE, {}).render(
        to_messages(CONVERSATION[:1] + CONVERSATION[-1:]), add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<|system|><|end|>\n<|assistant|>It is  "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, ChatMessage(role="assistant", tool_calls=[ToolCall(id="c", name="f")])),
        ("{{ messages[-1].role }}", ChatMessage(role="assistant", content="hidden")),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(template, message):
    with pytest.raises(InvalidArgumentError) as caught:
        ChatTemplate(template, {}).render(
            to_messages([message]), add_generation_prompt=False, continue_final_message=True
        )
    assert caught.value.field == "continue_final_message"


def test_templates_may_take_arguments_as_mapping_or_as_text():
    source = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is mapping }} {{ a.x }} {{ a | tojson }} "
        "{{ 'pre ' + a + ' post' }} {{ a }}"
    )
    messages = to_messages([ChatMessage(role="assistant", tool_calls=[ToolCall(name="f", arguments='{"x":1}')])])
    text = ChatTemplate(source, {}).render(messages, add_generation_prompt=False)
    assert text == 'True 1 {"x": 1} pre {"x":1} post {"x":1}'
    assert dict(CallArguments("{}")) == {}


@pytest.mark.parametrize("arguments", ["[]", "{", '{"a": ', "5", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_with_their_place(arguments):
    messages = [
        ChatMessage(role="user", content="a"),
        ChatMessage(role="assistant", tool_calls=[ToolCall(name="f"), ToolCall(name="g", arguments=arguments)]),
    ]
    with pytest.raises(InvalidArgumentError) as caught:
        to_messages(messages)
    assert caught.value.field == "messages[1].tool_calls[1].arguments"


def test_whether_a_template_shows_tools_is_told_from_its_source():
    assert ChatTemplate(TEMPLATE, {}).shows_tools
    assert not ChatTemplate(TRIMMING, {}).shows_tools
    assert not ChatTemplate("{# tools #}{% for m in messages %}tools {{ m.tools }}{% endfor %}", {}).shows_tools
    assert ChatTemplate("{% set offered = tools %}{{ offered }}", {}).shows_tools
