"""Files of JSON lines, with errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A file of data is of no use; says where and why."""


def read_json_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place (``file:3``). Empty lines are passed over.

    Raises:
        DataError: The file cannot be read, is empty, or a line is no JSON object.
    """
    objects = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: not JSON: {error}") from None
        if not isinstance(found, dict):
            raise DataError(f"{place}: not a JSON object")
        objects.append((place, found))
    if not objects:
        raise DataError(f"{path}: nothing in it")
    return objects


def read_text(path: Path) -> str:
    """A file's text. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8") from None


def whole(place: str, found: dict[str, Any], name: str, *, least: int = 1) -> int:
    """A field that is a whole number of at least ``least``. Raises DataError."""
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(f"{place}: {name} must be a whole number of at least {least}, got {value!r}")
    return value
