"""Builds the message that asks for a generation from plain Python values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from sapwood.generation import Options
from sapwood.v1 import common_pb2, router_pb2

MessageT = TypeVar("MessageT", bound=Message)

_CHOICES = {
    "auto": router_pb2.TOOL_CHOICE_AUTO,
    "none": router_pb2.TOOL_CHOICE_NONE,
    "required": router_pb2.TOOL_CHOICE_REQUIRED,
}

_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def build_request(
    text: str | None,
    messages: Iterable[Mapping[str, Any]] | None,
    token_ids: Iterable[int] | None,
    options: Options,
) -> router_pb2.RouterGenerateRequest:
    """The request message.

    Raises:
        ValueError: Not exactly one of the three prompts is given, more than one grammar is, there is no such option, or a value
            is beyond what its field can hold.
        TypeError: A value is of another type than its field.

    Each error names the option.
    """
    unknown = next((name for name in options if name not in Options.__annotations__), None)
    if unknown is not None:
        similar = difflib.get_close_matches(unknown, Options.__annotations__, n=1)
        raise ValueError(f"there is no option {unknown!r}" + (f"; {similar[0]}?" if similar else ""))
    if sum(prompt is not None for prompt in (text, messages, token_ids)) != 1:
        raise ValueError("give exactly one of text, messages and token_ids")
    stop, choice = options.get("stop", ()), options.get("tool_choice")
    tools, variables = options.get("tools"), options.get("template_variables")
    if choice is not None and choice not in _CHOICES:
        raise ValueError(f"tool_choice is one of {', '.join(_CHOICES)}, not {choice!r}")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"text: {text!r:.40} is no text")
    request = _made(
        router_pb2.RouterGenerateRequest,
        request_id=options.get("request_id", ""),
        model=options.get("model"),
        sampling=_sampling(options),
        stop=[stop] if isinstance(stop, str) else stop,
        skip_special_tokens=options.get("skip_special_tokens"),
        include_stop=options.get("include_stop", False),
        detokenize=options.get("detokenize"),
        tools="" if tools is None else json.dumps(list(tools), ensure_ascii=False),
        tool_choice=None if choice is None else _CHOICES[choice],
        tool_choice_function=options.get("tool_choice_function", ""),
        parallel_tool_calls=options.get("parallel_tool_calls"),
        bad_words=options.get("bad_words", ()),
        grammar=_grammar(options),
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message", False),
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        truncate_right=options.get("truncate_right", False),
        session=options.get("session", ""),
        add_special_tokens=options.get("add_special_tokens"),
        suffix=options.get("suffix", ""),
        whole=options.get("whole", False),
        template_variables="" if variables is None else json.dumps(dict(variables), ensure_ascii=False),
    )
    if text is not None:
        request.text = text
    elif messages is not None:
        request.messages.CopyFrom(router_pb2.ChatMessages(messages=[_message(turn) for turn in messages]))
    else:
        request.tokens.CopyFrom(_made(common_pb2.TokenIds, "token_ids", ids=token_ids))
    return request


def _made(cls: type[MessageT], option: str | None = None, /, **given: Any) -> MessageT:
    """A message. Raises TypeError or ValueError that names the option that is wrong, which is a field's name unless given."""
    try:
        return cls(**given)
    except (TypeError, ValueError):
        for name, value in given.items():
            try:
                cls(**{name: value})
            except (TypeError, ValueError) as error:
                raise type(error)(f"{option or name}: {value!r:.60} cannot be its value: {error}") from None
        raise


def _sampling(options: Options) -> common_pb2.SamplingParams:
    """The sampling settings among the options, which have the names of the message's fields."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name in _SAMPLING}
    given["bad_words_ids"] = [
        _made(common_pb2.TokenIds, "bad_words_ids", ids=ids) for ids in options.get("bad_words_ids") or ()
    ]
    given["logit_processors"] = [_processor(**call) for call in options.get("logit_processors") or ()]
    return _made(common_pb2.SamplingParams, **given)


def _processor(name: str, parameters: Mapping[str, Any] | None = None) -> common_pb2.LogitProcessor:
    return common_pb2.LogitProcessor(name=name, parameters=json.dumps(dict(parameters or {}), ensure_ascii=False))


def _grammar(options: Options) -> common_pb2.Grammar | None:
    schema, tag = options.get("json_schema"), options.get("structural_tag")
    given = {
        "json_schema": schema,
        "regex": options.get("regex"),
        "ebnf": options.get("ebnf"),
        "structural_tag": tag,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"give only one of {' and '.join(named)}")
    if not named:
        return None
    return common_pb2.Grammar(
        json_schema=_json(schema), regex=options.get("regex"), ebnf=options.get("ebnf"), structural_tag=_json(tag)
    )


def _json(value: Mapping[str, Any] | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _message(turn: Mapping[str, Any]) -> common_pb2.ChatMessage:
    """A turn; calls of tools may be in this package's form or in that of OpenAI's API. Raises TypeError, ValueError."""
    if not isinstance(turn, Mapping):
        raise TypeError(f"messages are mappings with role and content; {turn!r:.40} is none")
    if "role" not in turn:
        raise ValueError("a message has no role")
    return common_pb2.ChatMessage(
        role=turn["role"],
        content=turn.get("content"),
        name=turn.get("name"),
        tool_calls=[_call(call) for call in turn.get("tool_calls") or ()],
        tool_call_id=turn.get("tool_call_id"),
        reasoning=turn.get("reasoning"),
    )


def _call(call: Mapping[str, Any]) -> common_pb2.ToolCall:
    function = call.get("function", call)
    return common_pb2.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])
