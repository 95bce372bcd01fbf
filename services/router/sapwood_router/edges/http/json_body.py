"""Request bodies: parsed, and checked, with an error that names the parameter at fault."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from sapwood_common.contract.json_text import decode
from sapwood_common.contract.sampling import at_keys
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.left_out import LeftOut

Neutral = Mapping[str, tuple[Any, ...]]
"""Parameters, each with the values that ask for nothing, besides null."""

_MOST_EXPLAINED = 64 * 1024
"""Bytes up to which a body is searched for the parameter with bad Unicode, so that the error can name it."""

_NOTHING: tuple[Any, ...] = ("", False, [], {})
"""Values that ask for nothing, besides null."""
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
"""The new names of parameters that OpenAI has removed."""
_LONGEST_COMPARED = 40
"""Characters up to which an unknown name is compared with the known ones, which takes most of a millisecond."""
_MOST_COMPARED = 8
"""Unknown names that are compared with the one that is missing."""

_OF_OTHERS = {
    "messages": "/v1/chat/completions takes it",
    "prompt": "/v1/completions takes it",
    "input": "/v1/responses and /v1/embeddings take it",
}
"""What APIs call the prompt."""

FORMS = frozenset(
    {"response_format", "output_format", "output_config", "format", "json_schema", "structural_tag", "grammar", "ebnf", "regex"}
    | {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json", "choice", "stop_regex"}
)  # fmt: skip
"""Parameters by which APIs set the form of an answer. Clients rely on them, so they are never left out silently."""
_TAKE_FORMS = ("response_format", "output_config", "format", "sampling_params", "text")
"""Parameters that take a form, one in each API."""
_SHOWN = frozenset(
    {"images", "image_data", "documents", "input_ids", "prompt_token_ids", "prompt_embeds", "input_embeds"}
)
"""What APIs call parts of a prompt: a client relies on it that the model sees them."""

StructT = TypeVar("StructT", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_ANY_KEY = "[...]"
"""Stands in msgspec's paths for a key of an object."""
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object. How much is in it is for :mod:`json_size` to say, before.

    Raises:
        InvalidArgumentError: It is not JSON, not Unicode (the parameter is named), or not an object.
    """
    try:
        value = decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain(body, error) from error
    except RecursionError as error:
        raise InvalidArgumentError("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    return value


def convert(
    value: dict[str, Any],
    cls: type[StructT],
    neutral: Neutral,
    ignored: Collection[str] = (),
    prefix: str = "",
    *,
    left_out: LeftOut | None = None,
    spared: Collection[str] = (),
) -> StructT:
    """A checked request.

    Parameters that would change the answer but are not supported are refused unless they have a neutral value. So are fields of
    other APIs that set the form of the answer or the input of the model. Null asks for nothing, whatever its name. A whole
    number may be written with a point.

    Args:
        value: The JSON object.
        cls: What it should be.
        neutral: Parameters that are not supported, each with the values that ask for nothing.
        ignored: Parameters that are not looked at.
        prefix: What precedes the parameters' names in errors.
        left_out: Takes the parameters that no API knows; None: they are refused.
        spared: Parameters of ``neutral`` that are ignored with other values too, because an answer without them is acceptable.

    Raises:
        InvalidArgumentError: As said; the parameter is named.
    """
    known = _names_of(cls)
    taken: dict[str, Any] = {}
    unknown: list[str] = []
    for name, given in value.items():
        if given is None:
            continue
        if name in known:
            taken[name] = given
        elif name in neutral:
            if given in neutral[name]:
                continue
            if left_out is not None and name in spared:
                left_out.parameter(prefix + name, lambda: "")
            else:
                instead = f": use {_INSTEAD[name]}" if name in _INSTEAD else ": leave it out"
                raise InvalidArgumentError(f"{prefix}{name} is not supported{instead}", field=prefix + name)
        elif name not in ignored:
            shown = prefix + _printable(name)
            if left_out is None or shown in _OF_OTHERS:
                raise InvalidArgumentError(
                    f"unknown parameter: {shown!r}{_hint(name, shown, known, ignored)}", field=shown
                )
            if name in FORMS or name in _SHOWN:
                if given in _NOTHING:
                    continue
                raise InvalidArgumentError(f"{shown} is not supported here{_instead(name, known)}", field=shown)
            left_out.parameter(shown, partial(_hint, name, shown, known, ignored))
            unknown.append(name)
    make_whole(taken, cls)
    try:
        return msgspec.convert(taken, cls)
    except msgspec.ValidationError as error:
        raise _explain_type(str(error), prefix, unknown, taken, cls) from error


def make_whole(taken: dict[str, Any], cls: type[msgspec.Struct]) -> None:
    """Writes 140.0 as 140 where an integer belongs: some languages have one kind of number only."""
    for name, inner in _whole_numbers(cls).items():
        given = taken.get(name)
        if inner is None:
            if isinstance(given, float) and given.is_integer():
                taken[name] = int(given)
        elif isinstance(given, dict):
            taken[name] = given = {**given}
            make_whole(given, inner)


@cache
def _whole_numbers(cls: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """The fields that take integers and no other numbers, and those that are structs with such fields."""
    found: dict[str, type[msgspec.Struct] | None] = {}
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        integer = any(isinstance(kind, inspect.IntType) for kind in kinds)
        if integer and not any(isinstance(kind, inspect.FloatType) for kind in kinds):
            found[field.encode_name] = None
        for kind in kinds:
            if isinstance(kind, inspect.StructType) and kind.cls is not cls and _whole_numbers(kind.cls):
                found[field.encode_name] = kind.cls
    return found


@cache
def _names_of(cls: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(cls.__struct_fields__)


def _explain_type(
    text: str, prefix: str, unknown: Sequence[str], taken: Mapping[str, Any], cls: type[msgspec.Struct]
) -> InvalidArgumentError:
    found = _AT.match(text)
    if found and found["path"].endswith(_ANY_KEY):
        name = found["path"].removesuffix(_ANY_KEY)
        kinds = {each.encode_name: each.type for each in msgspec.structs.fields(cls)}
        keys = at_keys(taken.get(name), kinds.get(name, Any))
        what = found["what"]
        return InvalidArgumentError(f"{prefix}{name}: {what[:1].lower()}{what[1:]}{keys}", field=prefix + name)
    what, path = (found["what"], prefix + found["path"]) if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        misspelt = next((name for name in unknown[:_MOST_COMPARED] if _similar(name, (missing["name"],))), None)
        path = f"{path}.{missing['name']}" if path else missing["name"]
        hint = "" if misspelt is None else f"; {prefix}{misspelt} is not known"
        return InvalidArgumentError(f"{path} is required{hint}", field=path)
    choices = _choices(cls, found["path"] if found else "") if what.startswith("Invalid enum value") else ""
    return InvalidArgumentError(f"{path or 'body'}: {what[:1].lower()}{what[1:]}{choices}", field=path or None)


def _choices(cls: type[msgspec.Struct], path: str) -> str:
    """The values that a field may have, as the end of a message; empty if it is no list of texts."""
    kind: Any = inspect.type_info(cls)
    for name in re.findall(r"\w+|\[", path):
        options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        kind = None
        for option in options:
            if name == "[" and isinstance(option, inspect.ListType):
                kind = option.item_type
            elif isinstance(option, inspect.StructType):
                kind = next((each.type for each in option.fields if each.encode_name == name), kind)
        if kind is None:
            return ""
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    values = [value for option in options if isinstance(option, inspect.LiteralType) for value in option.values]
    return f"; it can be {', '.join(map(str, values))}" if values else ""


def _explain(body: bytes, error: Exception) -> InvalidArgumentError:
    # Slow, but only for bodies that are refused, and small: the standard parser lets bad Unicode through, so it can be located.
    try:
        found = json.loads(bytes(body).decode("utf-8", "surrogateescape")) if len(body) <= _MOST_EXPLAINED else None
        path = _find_bad_string(found, "")
    except (ValueError, RecursionError):
        path = None
    if path is not None:
        return InvalidArgumentError(f"{path or 'the body'} is not valid Unicode text", field=path or None)
    why = str(error) if body.strip() else "it is empty"
    return InvalidArgumentError(f"the body is not valid JSON: {why}")


def _find_bad_string(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return None if _is_unicode(value) else path
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        if not all(map(_is_unicode, value)):
            return path
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    for inner, item in items:
        found = _find_bad_string(item, inner)
        if found is not None:
            return found
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hint(name: str, shown: str, known: Collection[str], ignored: Collection[str]) -> str:
    """A suggestion for an unknown parameter, to append to the error; empty: none."""
    hint = _OF_OTHERS.get(shown) or _similar(name, (*known, *ignored))
    return f"; {hint}" if hint else ""


def _instead(name: str, known: Collection[str]) -> str:
    """The name that an API uses for another API's parameter of a form or a prompt, to append to the error."""
    if name not in FORMS:
        return ": the model would not see it"
    takes = next((other for other in _TAKE_FORMS if other in known), None)
    return f": the answer would not have that form{f'; {takes} takes it' if takes else ''}"


def _similar(name: str, known: Sequence[str]) -> str:
    """Asks whether the known name that is spelt nearly alike was meant; empty: there is none."""
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75) if len(name) <= _LONGEST_COMPARED else []
    return f"did you mean {similar[0]!r}?" if similar else ""


def _printable(name: str) -> str:
    return name[:100]
