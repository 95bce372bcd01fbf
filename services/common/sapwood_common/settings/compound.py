"""Settings of several parts: one flag for a feature instead of a flag for each of its numbers.

``--queue 512,wait=10`` gives the first part without its name and others by name. A variable holds the same text, a YAML file may
hold a mapping (``queue: {size: 512, wait: 10}``). Parts that are left out have their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Compound(BaseModel):
    """A setting of several parts; its first field is the one that is given without a name."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        return parts_of(cls, given)


class Switch(Compound):
    """A feature that can be turned on or off, with its parts. A subclass's first field is ``on``."""

    on: bool

    def __bool__(self) -> bool:
        """True if the feature is on."""
        return self.on


def parts_of(cls: type[Compound], given: Any) -> dict[str, Any]:
    """The parts that a value gives, by name; texts are not parsed yet.

    Raises:
        ValueError: A part is given twice, or there is no such part.
    """
    if isinstance(given, Compound):
        return dict(given)
    if isinstance(given, Mapping):
        return {_name(name): value for name, value in given.items()}
    names = list(cls.model_fields)
    if not isinstance(given, str):
        return {names[0]: given}
    parts: dict[str, Any] = {}
    for number, item in enumerate(given.split(",")):
        name, equals, value = item.partition("=")
        name = name.strip().replace("-", "_")
        if not number and (not equals or name not in names):
            name, value = names[0], item
        if name not in names:
            raise ValueError(f"{item!r} is no part: write {names[0].upper()} or NAME=VALUE, of {', '.join(names)}")
        if name in parts:
            raise ValueError(f"{name} is given twice")
        parts[name] = value.strip()
    return parts


def text_of(parts: Mapping[Any, Any]) -> str:
    """The parts as one text, which :func:`parts_of` reads."""
    return ",".join(f"{_name(name)}={value}" for name, value in parts.items() if value is not None)


def _name(key: Any) -> str:
    """A part's name; YAML reads an unquoted ``on`` as true."""
    return "on" if key is True else str(key).replace("-", "_")


def shown(value: Compound) -> str:
    """A value as the help shows a default: the first part, then those by name that are not None."""
    first, *others = dict(value).items()
    words = {True: "on", False: "off", None: "none"}
    head = words.get(first[1], first[1]) if first[1] is None or isinstance(first[1], bool) else first[1]
    named = [
        f"{name}={words.get(each, each) if isinstance(each, bool) else each}"
        for name, each in others
        if each is not None
    ]
    return ",".join([str(head), *named])
