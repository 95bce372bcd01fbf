"""Finds parts by name: Sapwood's own, and those that installed packages declare as entry points.

A package says in its pyproject.toml, for example::

    [project.entry-points."sapwood.policies"]
    my_policy = "my_package.policy:make"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar, cast

from sapwood_common.errors import ConfigError

PartT = TypeVar("PartT")


def find_part(group: str, name: str, own: Mapping[str, PartT]) -> PartT:
    """The part called ``name``: one of ``own``, or else an installed package's.

    Raises:
        ConfigError: There is none, or it cannot be imported.
    """
    if name in own:
        return own[name]
    for found in entry_points(group=group, name=name):
        try:
            return cast(PartT, found.load())
        except Exception as error:
            raise ConfigError(f"{group} {name!r} ({found.value}) cannot be imported: {error}") from error
    raise ConfigError(f"{name!r} is none of {', '.join(part_names(group, own))}")


def part_names(group: str, own: Mapping[str, object]) -> tuple[str, ...]:
    """The names that :func:`find_part` knows."""
    return tuple(sorted({*own, *(found.name for found in entry_points(group=group))}))
