"""Builds the message that asks for a generation from plain Python values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
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
        raise ValueError(
            f"there is no option {unknown!r}"
            + (f"; {similar[0]}?" if similar else "; help(sapwood.generation.Options) lists them")
        )
    if sum(prompt is not None for prompt in (text, messages, token_ids)) != 1:
        raise ValueError("give exactly one of text, messages and token_ids")
    stop, choice = options.get("stop", ()), options.get("tool_choice")
    tools, variables = options.get("tools"), options.get("template_variables")
    if choice is not None and choice not in _CHOICES:
        raise ValueError(f"tool_choice is one of {', '.join(_CHOICES)}, not {choice!r}")
    if text is not None and not isinstance(text, str):
        raise TypeError(
            f"text: {text!r:.40} is no text; messages= takes a conversation, token_ids= a list of token ids"
        )
    request = _made(
        router_pb2.RouterGenerateRequest,
        request_id=options.get("request_id", ""),
        model=options.get("model"),
        sampling=_sampling(options),
        stop=[stop] if isinstance(stop, str) else stop,
        skip_special_tokens=options.get("skip_special_tokens"),
        include_stop=options.get("include_stop", False),
        detokenize=options.get("detokenize"),
        tools="" if tools is None else json.dumps(_list("tools", tools), ensure_ascii=False),
        tool_choice=None if choice is None else _CHOICES[choice],
        tool_choice_function=options.get("tool_choice_function", ""),
        parallel_tool_calls=options.get("parallel_tool_calls"),
        bad_words=options.get("bad_words", ()),
        grammar=_grammar(options),
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message", False),
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        truncate_right=options.get("truncate_right", False),
        token_healing=options.get("token_healing", False),
        session=options.get("session", ""),
        add_special_tokens=options.get("add_special_tokens"),
        suffix=options.get("suffix", ""),
        whole=options.get("whole", False),
        template_variables="" if variables is None else json.dumps(dict(variables), ensure_ascii=False),
    )
    if text is not None:
        request.text = text
    elif messages is not None:
        request.messages.CopyFrom(
            router_pb2.ChatMessages(
                messages=[
                    _message(turn, f"messages[{index}]") for index, turn in enumerate(_list("messages", messages))
                ]
            )
        )
    else:
        request.tokens.CopyFrom(_made(common_pb2.TokenIds, "token_ids", ids=token_ids))
    return request


def _made(cls: type[MessageT], option: str | None = None, within: str = "", /, **given: Any) -> MessageT:
    """A message. Raises TypeError or ValueError that names the option that is wrong, which is a field's name unless given.

    Args:
        cls: The message's class.
        option: The option that all fields are part of.
        within: What stands before a field's name, such as ``messages[0].``.
        given: The fields.
    """
    try:
        return cls(**given)
    except (TypeError, ValueError):
        for name, value in given.items():
            try:
                cls(**{name: value})
            except (TypeError, ValueError) as error:
                kind = _kind(cls.DESCRIPTOR.fields_by_name[name])
                raise type(error)(
                    f"{option or within + name}: {value!r:.60} cannot be its value; it takes {kind}"
                ) from None
        raise


def _kind(field: Any) -> str:
    """What a field (a ``FieldDescriptor`` of either implementation of protobuf) takes, in words."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys, values = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return f"a dictionary from {_kind(keys)} to {_kind(values)}"
    found = _KINDS.get(field.cpp_type, "something else")
    return f"a list, each item {found}" if field.is_repeated else found


_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: "an integer from -2^31 to 2^31 - 1",
    FieldDescriptor.CPPTYPE_INT64: "an integer from -2^63 to 2^63 - 1",
    FieldDescriptor.CPPTYPE_UINT32: "an integer from 0 to 2^32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "a text",
}


def _list(option: str, value: Any, instead: str = "") -> list[Any]:
    """A list of an option's items. Raises TypeError that names the option and what it takes, ``instead`` of a list too."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{option}: {value!r:.60} cannot be its value; it takes {instead}a list")
    return list(value)


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
    return _made(
        common_pb2.Grammar,
        json_schema=_json("json_schema", schema),
        regex=options.get("regex"),
        ebnf=options.get("ebnf"),
        structural_tag=_json("structural_tag", tag),
    )


def _json(option: str, value: Mapping[str, Any] | str | None) -> str | None:
    """An option's value as JSON. Raises TypeError that names the option."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise TypeError(f"{option}: {error}; it takes JSON, as a text or as a dictionary") from None


def _message(turn: Mapping[str, Any], where: str) -> common_pb2.ChatMessage:
    """A turn; calls of tools may be in this package's form or in that of OpenAI's API.

    Raises:
        TypeError: A value is of another type than its field.
        ValueError: A field is missing.

    Each error names the field, after ``where``.
    """
    if not isinstance(turn, Mapping):
        raise TypeError(f"{where}: messages are mappings with role and content; {turn!r:.40} is none")
    if "role" not in turn:
        raise ValueError(f"{where}.role is required")
    content, items = turn.get("content"), []
    if content is None and turn["role"] != "assistant":
        raise ValueError(f"{where}.content is required")
    if content is not None and not isinstance(content, str):
        items = [
            _part(part, f"{where}.content[{n}]")
            for n, part in enumerate(_list(f"{where}.content", content, "a text or "))
        ]
        content = "\n".join(item.text for item in items if item.HasField("text"))
    pictured = any(item.HasField("picture") for item in items)
    calls = _list(f"{where}.tool_calls", turn.get("tool_calls") or ())
    return _made(
        common_pb2.ChatMessage,
        None,
        f"{where}.",
        role=turn["role"],
        content=content,
        parts=[item.text for item in items if item.HasField("text")] if len(items) > 1 else (),
        items=items if pictured else (),
        name=turn.get("name"),
        tool_calls=[_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)],
        tool_call_id=turn.get("tool_call_id"),
        reasoning=turn.get("reasoning"),
    )


def _part(part: Mapping[str, Any], where: str) -> common_pb2.ContentPart:
    """A part of content: in OpenAI's form, or ``{"type": "image", "image": ...}`` with a file's bytes, its path, or a URL; videos
    likewise. Raises TypeError, ValueError that name the field, after ``where``; OSError if the file cannot be read."""
    kind = _value(part, "type", where)
    if kind == "text":
        return _made(common_pb2.ContentPart, None, f"{where}.", text=_value(part, "text", where))
    if kind in ("image_url", "video_url"):
        given = _value(part, kind, where)
        within = f"{where}.{kind}"
        url, detail = (
            (given, "") if isinstance(given, str) else (_value(given, "url", within), given.get("detail") or "")
        )
        video = kind == "video_url"
        source = _made(common_pb2.PictureSource, None, f"{within}.", url=url, detail=detail, video=video)
        return common_pb2.ContentPart(picture=source)
    if kind in ("image", "video"):
        image, video = _value(part, kind, where), kind == "video"
        if isinstance(image, str) and image.partition(":")[0] in ("data", "http", "https"):
            return common_pb2.ContentPart(picture=common_pb2.PictureSource(url=image, video=video))
        if not isinstance(image, bytes | str | Path):
            raise TypeError(f"{where}.{kind}: {image!r:.60} cannot be its value; it takes bytes, a path or a URL")
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        return common_pb2.ContentPart(picture=common_pb2.PictureSource(data=data, video=video))
    raise ValueError(f"{where}.type: {kind!r:.40} is none of text, image_url, video_url, image and video")


def _call(call: Mapping[str, Any], where: str) -> common_pb2.ToolCall:
    """A call of a tool. Raises TypeError, ValueError that name the field, after ``where``."""
    number = _value(call, "id", where)
    if "function" in call:
        call, where = call["function"], f"{where}.function"
    name, arguments = _value(call, "name", where), _value(call, "arguments", where)
    return _made(common_pb2.ToolCall, None, f"{where}.", id=number, name=name, arguments=arguments)


def _value(given: Mapping[str, Any], name: str, where: str) -> Any:
    """A field that must be there. Raises TypeError, ValueError that name it, after ``where``."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: {given!r:.60} cannot be its value; it takes a dictionary with {name}")
    if name not in given:
        raise ValueError(f"{where}.{name} is required")
    return given[name]
