"""Flags that have got another name. The old name is read for one version more, and a warning names the new one.

A flag, its variable and its entry in a YAML file have one name, so one entry covers all three.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from sapwood_common.settings.compound import Compound, parts_of, text_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retired:
    """The present name of a setting of an earlier version.

    Attributes:
        setting: The setting's name.
        part: The part of it that the old setting became; empty: the setting only got another name.
        switch: True if the old flag took no value.
    """

    setting: str
    part: str
    switch: bool = False


def retired_parts(setting: str, **parts: str) -> dict[str, Retired]:
    """Old settings that became parts of one: ``retired_parts("queue", queue_size="size")``."""
    return {old: Retired(setting, part) for old, part in parts.items()}


def compound_of(cls: type[BaseModel], name: str) -> type[Compound] | None:
    """The class of a setting of several parts; None for others."""
    annotation = cls.model_fields[name].annotation
    found = next((each for each in (annotation, *get_args(annotation)) if isinstance(each, type)), None)
    return found if found is not None and issubclass(found, Compound) else None


def renewed(
    cls: type[BaseModel], retired: Mapping[str, Retired], values: Mapping[str, Any], named: Callable[[str], str] = str
) -> dict[str, Any]:
    """Settings under their present names.

    Args:
        cls: The fields.
        retired: What earlier versions' settings became.
        values: Settings by name, of this version or an earlier one.
        named: How a warning writes a setting: as a flag, a variable or an entry of a file.

    Raises:
        ValueError: The value of a present setting is malformed; the message names the setting.
    """
    new = {name: value for name, value in values.items() if name not in retired}
    for name, value in values.items():
        if name not in retired:
            continue
        found = retired[name]
        logger.warning(
            "%s is now %s; the old name will be gone in the next version",
            named(name),
            named(found.setting) + (f" {found.part}={_text(value)}" if found.part else ""),
        )
        compound = compound_of(cls, found.setting)
        if compound is None:
            new.setdefault(found.setting, value)
        else:
            try:
                earlier = parts_of(compound, new[found.setting]) if found.setting in new else {}
            except ValueError as error:
                raise ValueError(f"{named(found.setting)}: {error}") from error
            new[found.setting] = text_of(earlier | {found.part: _text(value)})
    return new


def in_environment(retired: Mapping[str, Retired], prefix: str) -> Iterator[tuple[str, str]]:
    """Old settings whose variables are set, with the values."""
    for name in retired:
        value = os.environ.get(f"{prefix}{name}".upper())
        if value is not None:
            yield name, value


def _text(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
