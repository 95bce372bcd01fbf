"""Flags of every command line, the services' and the ``sapwood`` command's: one way to name, explain and read them.

Imports the standard library only: the ``sapwood`` command runs where the services' packages are not installed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

Kind = Literal["value", "switch", "list", "compound switch"]
"""``--flag VALUE``; ``--flag`` or ``--no-flag``; ``--flag VALUE ...``; ``--flag``, ``--flag on,part=VALUE`` or ``--no-flag``."""


def service_flag(service: str, name: str) -> str:
    """A service's flag as an answer names it, however the service was started: ``service_flag("worker", "storage")``."""
    return f"the {service}'s --{name} (--{service}-{name} of `sapwood up`)"


def add_option(
    parser: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    variable: str,
    default: Any = None,
    shown_default: str | None = None,
    kind: Kind = "value",
    parse: Callable[[str], Any] = str,
    metavar: str | None = None,
    dest: str | None = None,
    reads_variable: bool = True,
) -> None:
    """Adds a flag, whose help ends with the variable and the default.

    Args:
        parser: Gets the flag.
        flag: Such as ``--max-tokens``.
        text: A sentence; variable and default are added to it.
        variable: The environment variable of the same meaning.
        default: The value without the flag.
        shown_default: The text in the help instead of ``default``.
        kind: What follows the flag.
        parse: Parses a value; raises ``argparse.ArgumentTypeError`` or ValueError.
        metavar: The value's name in the help; the flag's last word unless given.
        dest: The name among the parsed arguments; the flag's own unless given.
        reads_variable: Whether the variable's value is the default where it is set; else it is read elsewhere.
    """
    words = shown_default if shown_default is not None else "none" if default is None else str(default)
    shown = metavar or flag.rsplit("-", 1)[-1].upper()
    if reads_variable:
        # argparse parses a text default as if it had been typed, so a wrong variable is reported like a wrong flag.
        default = os.environ.get(variable, default)
        parse = _naming(variable, parse)
    how: dict[str, Any] = {"type": parse, "metavar": shown}
    if kind == "switch":
        how = {"action": argparse.BooleanOptionalAction}
    elif kind == "list":
        how["nargs"] = "*"
    elif kind == "compound switch":
        how = {"action": _CompoundSwitch, "metavar": "on|off,PART=VALUE"}
    explained = f"{text} [{variable}; default: {words}]".replace("%", "%%")
    name = dest or flag.strip("-").replace("-", "_")
    parser.add_argument(flag, dest=name, default=default, help=explained, **how)


def _naming(variable: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser, which says of a wrong value of the variable where it is from."""
    present = os.environ.get(variable)

    def named(text: str) -> Any:
        try:
            return parse(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error} ({variable})" if text == present else str(error)) from None

    return named


class _CompoundSwitch(argparse.Action):
    """``--flag`` is ``on``, ``--no-flag`` is ``off``, and ``--flag on,part=value`` is itself."""

    def __init__(self, option_strings: Sequence[str], dest: str, **others: Any) -> None:
        flags = [*option_strings, *(f"--no-{flag.removeprefix('--')}" for flag in option_strings)]
        super().__init__(flags, dest, nargs="?", **others)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None and option_string.startswith("--no-"):
            if values is not None:
                parser.error(f"{option_string} takes no value")
            values = "off"
        setattr(namespace, self.dest, "on" if values is None else values)


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser of a fixed set of words (``choices=`` would not check what comes from a variable)."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def number(text: str) -> float:
    """A parser of numbers."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole_number(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """A parser of integers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if (least is not None and value < least) or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} is not {f'{least} to {most}' if most else f'at least {least}'}")
        return value

    return parse


PORT = whole_number(1, 65535)
"""A parser of port numbers."""
