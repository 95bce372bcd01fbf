"""`sapwood docs [PAGE]`: the pages that messages name, from the installed package."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, CliError


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "docs",
        help="print a page of the documentation",
        description="Prints a page, such as `models` for the docs/models.md that a message names, or lists the pages.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("page", nargs="?", metavar="PAGE", help="its name, with or without folder and ending")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints a page or their names; returns the exit code, raises CliError."""
    folder = _folder()
    pages = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.md"))}
    if arguments.page is None:
        print("\n".join(pages))
        return 0
    name = str(arguments.page).removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        similar = difflib.get_close_matches(name, pages, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "`sapwood docs` lists them"
        raise CliError(f"there is no page {name!r}; {hint}", REFUSED)
    print(pages[name].read_text(encoding="utf-8"), end="")
    return 0


def _folder() -> Path:
    """Where the pages are: in the package as it is installed, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "docs", package.parent / "docs"):
        if folder.is_dir():
            return folder
    raise CliError("this installation has no pages", FAILED)
