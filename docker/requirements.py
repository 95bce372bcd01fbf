"""Prints what the named extras of pyproject.toml require, one a line: what an image installs before the sources come in."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """The requirements of the project and of its extras, with extras that name other extras followed."""
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    found: dict[str, None] = dict.fromkeys(project["dependencies"])  # type: ignore[call-overload]
    todo = list(extras)
    while todo:
        for requirement in optional[todo.pop()]:
            own = re.fullmatch(r"sapwood\[(.+)\]", requirement)
            if own is not None:
                todo += own[1].split(",")
            else:
                found[requirement] = None
    return list(found)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("rb") as file:
        print("\n".join(requirements(tomllib.load(file)["project"], sys.argv[2:])))
