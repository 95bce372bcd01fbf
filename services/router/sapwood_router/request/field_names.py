"""Errors of the tokenizer and the worker name *their* fields; here they come to name the client's."""

from __future__ import annotations

import re

from sapwood_common.errors import InternalError, InvalidArgumentError, SapwoodError
from sapwood_router.request.context import FieldNames

_SAMPLING = "sampling."
_TOOL_CALLS = "tool_calls."
_PART_OF_CALL = re.compile(r"(?<=\.tool_calls\[)(\d+\]\.)(?=name$|arguments$)")
_ITEMS = re.compile(r"(?<=\.)items(?=\[)")
_REASONING = re.compile(r"(?<=\.)reasoning$")


def to_client_field(error: SapwoodError, fields: FieldNames) -> SapwoodError:
    """The same error with its field as the client spells it.

    An InvalidArgumentError about a field that the client never set (one the router fills in) is the router's own fault.
    """
    if error.field is None:
        return error
    name = _translate(error.field, fields)
    if name is None:
        if isinstance(error, InvalidArgumentError):
            return InternalError(f"a service refused its request: {error.field}: {error.message}")
        return type(error)(error.message, retry_after=error.retry_after)
    return type(error)(_renamed(error.message, error.field, name), field=name, retry_after=error.retry_after)


def _renamed(message: str, service_name: str, client_name: str) -> str:
    """A message that begins with a service's name of the field, with the client's."""
    ours, theirs = (name.rpartition(".")[2] for name in (service_name, client_name))
    return re.sub(rf"^{re.escape(ours)}\b", lambda _: theirs, message) if ours != theirs else message


def _translate(field: str, fields: FieldNames) -> str | None:
    if field.startswith(_SAMPLING):
        name = field.removeprefix(_SAMPLING)
        return fields.max_tokens if name == "max_tokens" else fields.sampling + name
    if field.startswith(_TOOL_CALLS):
        name = field.removeprefix(_TOOL_CALLS)
        return fields.tool_name if name == "name" else _in_tool(name, fields)
    if field.startswith("grammar"):
        return None if field == "grammar.compiled" else fields.grammar or field
    stem, bracket, rest = field.partition("[")
    match stem:
        case "pictures" if fields.pictures:
            return fields.pictures + bracket + rest
        case "token_ids" | "pictures":  # the worker's names of the whole prompt, and of what is in it
            return fields.prompt
        case "texts":  # texts[0] is the prompt: the router sends one
            return fields.prompt
        case "messages":
            name = _PART_OF_CALL.sub(rf"\1{fields.call}", bracket + rest)
            name = _ITEMS.sub(fields.items, name)
            return _in_turn(_REASONING.sub(fields.reasoning, name), fields)
        case "tools":
            return _in_tool(field, fields)
        case "stop":
            return fields.stop
        case "model" | "suffix" | "continue_final_message" | "bad_words" | "continuations":
            return field
        case "template_variables":
            return fields.template_variables
        case "reasoning_parser":
            return fields.grammar or "grammar"
        case _:
            return None


def _in_turn(name: str, fields: FieldNames) -> str:
    """``[2].content`` of a conversation."""
    number, bracket, rest = name.removeprefix("[").partition("]")
    if not fields.turns or not bracket:
        return fields.prompt + name
    return fields.turns[int(number)] + rest


def _in_tool(name: str, fields: FieldNames) -> str:
    """``tools[2].function.parameters``, and what is in it."""
    tool, function, inner = name.partition("].function.")
    if not function:
        return name
    if inner.startswith("parameters"):
        inner = fields.parameters + inner.removeprefix("parameters")
    return f"{tool}].{fields.tool}{inner}"
