"""How a mixture's files say that experts are chosen; contradictions are refused by the files' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sapwood_kernels.experts.routing import Routing


def read_routing(
    values: Mapping[str, Any], experts: str, chosen: str, groups: tuple[str, str] | None = None, **rest: Any
) -> Routing:
    """The routing that settings give.

    Args:
        values: The settings.
        experts: Which of them is the number of experts.
        chosen: The setting's name for the number of experts that a token goes to.
        groups: Which are the number of groups and of those that a token chooses; None: there is one group.
        **rest: What else :class:`Routing` takes.

    Raises:
        KeyError: A setting is missing.
        ValueError: The numbers do not fit together; names the settings.
    """
    names = {"experts": experts, "chosen": chosen, **dict(zip(("groups", "chosen_groups"), groups or (), strict=False))}
    numbers: dict[str, Any] = {part: int(values[name]) for part, name in names.items()}
    try:
        return Routing(**numbers, **rest)
    except ValueError as error:
        said = ", ".join(f"{name} {numbers[part]}" for part, name in names.items())
        raise ValueError(f"{said}: {error}") from error
