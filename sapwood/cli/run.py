"""`sapwood run MODEL [QUESTION]`: a model started, asked and stopped in one command."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sapwood.cli import chat, up
from sapwood.cli.errors import EXIT_CODES, CliError, without_flag
from sapwood.cli.request import add_request_options, add_structure_options
from sapwood.cli.terminal import open_terminal


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "run",
        help="start a model, talk to it, stop it",
        description="Starts a worker, a tokenizer and a router on free ports, holds a conversation as `sapwood chat` does, and "
        "stops them. With QUESTION it prints the answer and ends. `sapwood up` has the flags of the services.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", nargs="?", default="demo", metavar="MODEL", help="what `sapwood up` takes [default: demo]"
    )
    parser.add_argument("question", nargs="*", metavar="QUESTION", help="one question; several words are one")
    parser.add_argument("--system", metavar="TEXT", help="What the model reads first. [default: nothing]")
    add_request_options(parser, max_tokens=512, of_router=False)
    add_structure_options(parser, tools=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code, raises CliError."""
    from sapwood.cli.fetch import fetch_models
    from sapwood.cli.local.background import BackgroundCluster
    from sapwood.errors import SapwoodError

    with without_flag():
        services = up.services_of(["--workers", "1", "--ports", "auto", "--model", arguments.name])
        fetch_models(services)
    background = BackgroundCluster(services, None)
    terminal = open_terminal(sys.stderr)
    try:
        try:
            terminal.status(f"starting {arguments.name}")
            arguments.address, arguments.model = background.start().grpc, None
        finally:
            terminal.status("")
            terminal.close()
        return chat.run(arguments, " ".join(arguments.question))
    except SapwoodError as error:
        raise CliError(error.message) from None
    finally:
        background.stop()
