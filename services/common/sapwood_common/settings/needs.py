"""Finds settings that would change nothing. A configuration says what its settings need to have an effect; a service does not
start with a setting whose need is not met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Needs:
    """What some settings need to have an effect.

    Attributes:
        settings: Their names; ``queue.wait`` is a part of a setting.
        met: Whether a configuration meets their requirement.
        what: The same in words, with the names of settings in braces: "without {storage}".
    """

    settings: tuple[str, ...]
    met: Callable[[Any], bool]
    what: str


def idle_settings(config: BaseModel, needs: Iterable[Needs]) -> list[tuple[str, str]]:
    """The changed settings that have no effect, each with its requirement, in the order of ``needs``.

    A setting that equals its default is passed over, even if it was given: files for many deployments spell defaults out.
    """
    fields = type(config).model_fields
    defaults = type(config).model_construct(**{n: f.get_default(call_default_factory=True) for n, f in fields.items()})
    found: dict[str, str] = {}
    for each in needs:
        given = [name for name in each.settings if attrgetter(name)(config) != attrgetter(name)(defaults)]
        if given and not each.met(config):
            for name in given:
                found.setdefault(name, each.what)
    return list(found.items())
