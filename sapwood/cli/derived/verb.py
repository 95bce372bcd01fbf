"""The common part of `sapwood model quantize` and `sapwood model drafter`: both make a new model from a model."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, CliError

Fetch = Callable[[str, str | None], Path]
"""Makes sure that a model of some revision is here, and says where."""


def add_verb(
    nouns: Any,
    name: str,
    run: Callable[[Fetch, argparse.Namespace], int],
    fetch: Fetch,
    *,
    help_line: str,
    description: str,
) -> argparse.ArgumentParser:
    """Adds a verb with its model, its new directory and `--revision` to those of `sapwood model`; returns its parser."""
    parser: argparse.ArgumentParser = nouns.add_parser(
        name,
        help=help_line,
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="IN", help="a Hugging Face directory, or a model of the hub (fetched first)")
    parser.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        help="the new directory, or a new .gguf file" if name == "quantize" else "the new directory",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub [default: main]")
    parser.set_defaults(run=partial(run, fetch))
    return parser


def need_packages(extra: str) -> None:
    """Raises CliError where the library for weights is not installed; ``extra`` names the extra that brings it."""
    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise CliError(f"{package} is not installed: pip install 'sapwood[{extra}]'", REFUSED)


@contextmanager
def writing() -> Iterator[None]:
    """Raises CliError where the model inside cannot be read or written."""
    from sapwood_common.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from None
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", FAILED) from None
