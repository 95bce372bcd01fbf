"""Templates of model families, written after their makers' documentation, compared with transformers' rendering of the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sapwood.v1 import common_pb2
from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.serve.chat_messages import to_messages, to_variables
from sapwood_tokenizer.template.chat_template import ChatTemplate
from sapwood_tokenizer.vocab.loader import load_tokenizer

FOLDER = Path(__file__).parent / "templates"
SPECIAL = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen3": {"eos_token": "<|im_end|>"},
    "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "deepseek": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather, <now> & later: d'été",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
Message = common_pb2.ChatMessage


def call(identity: str, name: str, arguments: dict[str, Any]) -> common_pb2.ToolCall:
    return common_pb2.ToolCall(id=identity, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


USER, REPLY = Message(role="user", content="  Hi <there> 👩‍👩‍👧\n"), Message(role="assistant", content=" Hello\n\n")
SYSTEM, AGAIN = Message(role="system", content="Be brief: é, \"'&"), Message(role="user", content="And?")
CALLING = Message(role="assistant", tool_calls=[call("abcdef123", "weather", {"city": "Köln", "days": 2})])
CALLING_TWICE = Message(
    role="assistant", content="Let me see.", reasoning="Both.\n", tool_calls=[*CALLING.tool_calls] * 2
)
RESULT = Message(role="tool", tool_call_id="abcdef123", content='{"sky": "grau"}')
THOUGHT = Message(role="assistant", content="<think>\nhm\n</think>\n\nSo.")
REASONED = Message(role="assistant", content="So.", reasoning="\nfirst\nsecond\n")

CONVERSATIONS = {
    "question": [USER],
    "with system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, REPLY, AGAIN],
    "turns without system": [USER, REPLY, AGAIN],
    "answered": [USER, REPLY],
    "called": [USER, CALLING, RESULT],
    "called and answered": [SYSTEM, USER, CALLING, RESULT, REPLY, AGAIN],
    "called twice": [USER, CALLING_TWICE, RESULT, RESULT],
    "thought": [USER, THOUGHT, AGAIN],
    "reasoned": [USER, REASONED, AGAIN, REASONED],
    "two systems": [SYSTEM, SYSTEM, USER],
    "wrong order": [REPLY, USER],
    "empty": [Message(role="user", content=""), Message(role="assistant", content="")],
}


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders, with "" for absent content where the template trips over it; None where it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    try:
        rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    except TypeError:
        if all(message["content"] is not None for message in messages):
            return None
        filled = [{**message, "content": message["content"] or ""} for message in messages]
        return theirs(source, filled, **options)
    except Exception:
        return None
    text: str = rendered[0]
    if "None" in text and any(
        message["content"] is None for message in messages
    ):  # theirs writes absent content as None
        return theirs(source, [{**message, "content": message["content"] or ""} for message in messages], **options)
    return text


def ours(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except InvalidArgumentError:
        return None


def agree(source: str, special: dict[str, str]) -> int:
    """Compares every conversation with every option; how many of them render."""
    template = ChatTemplate(source, special)
    rendered = 0
    for messages in map(to_messages, CONVERSATIONS.values()):
        for tools in ([], TOOLS):
            for prompted, continued in ((True, False), (False, False), (False, True)):
                options: dict[str, Any] = {"add_generation_prompt": prompted, "continue_final_message": continued}
                expected = theirs(source, messages, tools=tools or None, **options, **special)
                assert ours(template, messages, tools=tools, **options) == expected, (messages, tools, options)
                rendered += expected is not None
    return rendered


@pytest.mark.parametrize("family", SPECIAL)
def test_every_conversation_renders_as_by_transformers(family: str) -> None:
    source = (FOLDER / f"{family}.jinja").read_text()
    assert agree(source, SPECIAL[family]) > len(CONVERSATIONS)


@pytest.mark.parametrize("package", ["llama3", "qwen3"])
def test_the_templates_that_published_tokenizers_bring_render_as_by_transformers(
    packaged: Callable[[str], Path], package: str
) -> None:
    loaded = load_tokenizer(packaged(package))
    assert loaded.chat_template is not None
    assert agree(loaded.chat_template, loaded.special_tokens) > len(CONVERSATIONS)


DOCUMENTED = {
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "gemma3": "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] Hi[/INST] Hello</s>[INST] Be brief.\n\nBye[/INST]",
    "deepseek": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>"
    "<｜User｜>Bye<｜Assistant｜></think>",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "Hello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("family", DOCUMENTED)
def test_a_plain_conversation_is_what_the_documentation_shows(family: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    template = ChatTemplate((FOLDER / f"{family}.jinja").read_text(), SPECIAL[family])
    text = template.render(messages, add_generation_prompt=True)
    assert text == DOCUMENTED[family] or (
        family == "llama3" and text.endswith("Be brief.<|eot_id|>" + DOCUMENTED[family])
    )


def test_a_callers_variables_reach_the_template() -> None:
    source = (FOLDER / "qwen3.jinja").read_text()
    template = ChatTemplate(source, {})
    messages = to_messages([USER])
    for variables in ({"enable_thinking": False}, {"enable_thinking": True}, {}):
        text = template.render(messages, add_generation_prompt=True, variables=variables)
        assert text == theirs(source, messages, add_generation_prompt=True, **variables)
        assert text.endswith("<think>\n\n</think>\n\n") == (variables == {"enable_thinking": False})
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidArgumentError, match=name) as caught:
            template.render(messages, add_generation_prompt=True, variables={name: 1})
        assert caught.value.field == "template_variables"
    assert to_variables("") == {}
    assert to_variables('{"a": [1]}') == {"a": [1]}
    for wrong in ("[1]", "{", "[" * 100_000):
        with pytest.raises(InvalidArgumentError) as caught:
            to_variables(wrong)
        assert caught.value.field == "template_variables"


def test_the_demo_models_own_template_is_the_familys(demo_model: Path) -> None:
    loaded = load_tokenizer(demo_model)
    assert loaded.chat_template is not None
    family = ChatTemplate((FOLDER / "gemma3.jinja").read_text(), SPECIAL["gemma3"])
    own = ChatTemplate(loaded.chat_template, loaded.special_tokens)
    for name in ("question", "with system", "turns", "answered"):
        messages = to_messages(CONVERSATIONS[name])
        for prompted in (True, False):
            assert own.render(messages, add_generation_prompt=prompted) == family.render(
                messages, add_generation_prompt=prompted
            )
