"""Families with experts, behind a router and a real tokenizer: what each template says of tools and thinking is acted on.

Templates are abridged after what their makers publish: what shows tools, begins an answer and tells the parsers is as there.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_worker import FakeWorker

TEMPLATES = Path(__file__).parents[3] / "tokenizer" / "template" / "templates"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {"x": {}}}},
    }
]


class Family(NamedTuple):
    """A chat template, what the model then writes, and what a request says next to it."""

    template: str
    output: str
    content: str = "I call."
    reasoning: str | None = "Hm."
    variables: str = "{}"


KIMI = """
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|><think>{{ message.reasoning_content }}</think>
    {%- if message.tool_calls -%}<|tool_calls_section_begin|>{%- endif -%}
  {%- else -%}<|im_user|>user<|im_middle|>{%- endif -%}{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
GLM = """[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{%- endif -%}
{%- for m in messages %}<|{{ m.role }}|>
{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
    {{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""
GPT_OSS = """<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|># Tools
namespace functions { {{ tools | tojson }} }<|end|>{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis #}"""
MINIMAX = """{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{%- set toolcall_end_token = '</minimax:tool_call>' -%}
{%- if tools %}]~!b[]~b]system
# Tools
{{ tools | tojson }}
{{ toolcall_begin_token }}<invoke name="tool-name-1"></invoke>{{ toolcall_end_token }}[e~[{% endif %}
{%- for m in messages %}]~b]{{ m.role }}
{{ m.content }}[e~[{% endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{% endif %}"""

FAMILIES = {
    "Qwen3 MoE": Family(
        (TEMPLATES / "qwen3.jinja").read_text(),
        '<think>\nHm.\n</think>\n\nI call.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>',
    ),
    "Mixtral 8x22B": Family(
        (TEMPLATES / "mistral.jinja").read_text(),
        'I call.[TOOL_CALLS][{"name": "f", "arguments": {"x": "é"}, "id": "abcdef123"}]',
        reasoning=None,
    ),
    "DeepSeek V3.1": Family(
        (TEMPLATES / "deepseek.jinja").read_text(),
        "Hm.</think>I call.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"x": "é"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        variables='{"thinking": true}',
    ),
    "Kimi K2": Family(
        KIMI,
        "<think>Hm.</think>I call.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"x": "é"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "GLM 4.5": Family(
        GLM,
        "\n<think>Hm.</think>\nI call.\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>é</arg_value>\n</tool_call>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": "é"}<|call|>',
        content="",
    ),
    "MiniMax M2": Family(
        MINIMAX,
        'Hm.</think>\n\nI call.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">é</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_request_with_tools_is_answered_with_reasoning_and_a_call(
    wait_until, start_tokenizer, byte_tokenizer, name
):
    import openai

    family, worker = FAMILIES[name], FakeWorker()
    worker.script.tokens = lambda prompt: byte_tokenizer.encode(family.output).ids
    await worker.start()
    with start_tokenizer(family.template) as tokenizer:
        config = RouterConfig(
            port=0, http_port=0, tokenizer=tokenizer.address, workers=(worker.address,), health_interval=0.1,
            request_timeout=120, worker_silence=60, tokenizer_grace=60,
        )  # fmt: skip
        router = RouterApplication(config)
        await router.start()
        try:
            await wait_until(lambda: router.problem() is None)
            url = f"http://127.0.0.1:{router.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                asked: dict[str, Any] = {
                    "model": "fake",
                    "messages": [{"role": "user", "content": "Do it."}],
                    "tools": TOOLS,
                    "max_tokens": 1000,
                    "extra_body": {"chat_template_kwargs": json.loads(family.variables)},
                }
                answer = await client.chat.completions.create(**asked)
                streams = [
                    [
                        chunk.choices[0]
                        async for chunk in await client.chat.completions.create(
                            **asked, n=2, stream=True, tool_choice=choice
                        )
                    ]
                    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}})
                ]
        finally:
            await router.stop()
            await worker.kill()
    [choice] = answer.choices
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": "é"})
    assert (choice.message.content or "").strip() == family.content
    assert getattr(choice.message, "reasoning_content", None) == family.reasoning
    for stream, index in product(streams, range(2)):
        deltas = [each.delta for each in stream if each.index == index]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (family.reasoning or "")
        assert "".join(delta.content or "" for delta in deltas).strip() == family.content
        pieces = [each.function for delta in deltas for each in delta.tool_calls or ()]
        assert [piece.name for piece in pieces if piece.name] == ["f"]
        assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"x": "é"}
        assert [each.finish_reason for each in stream if each.index == index and each.finish_reason] == ["tool_calls"]
    assert "Does it." in byte_tokenizer.decode(worker.calls[0].request.token_ids), "the model is shown the tool"
