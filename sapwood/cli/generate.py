"""`sapwood generate TEXT`: streams the continuation of a prompt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES, REFUSED, CliError
from sapwood.cli.request import (
    add_request_options,
    add_structure_options,
    failing_plainly,
    open_client,
    request_options,
    structure_options,
)
from sapwood.cli.terminal import harmless

if TYPE_CHECKING:
    from sapwood.generation import Options


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "generate",
        help="continue a text",
        description="Streams the continuation of TEXT to standard output.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="A picture that TEXT is about, or its URL; may be given several times. TEXT is then what a user says in a chat.",
    )
    add_request_options(parser)
    add_structure_options(parser, tools=False)
    parser.add_argument(
        "--json", action="store_true", help="One JSON object a line for each piece of the answer. [default: plain text]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code, raises CliError."""
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    options: Options = {**request_options(arguments), **structure_options(arguments)}
    messages = None
    if arguments.image:
        parts = [{"type": "image", "image": _picture(image)} for image in arguments.image]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    with (
        failing_plainly(arguments.address),
        open_client(arguments) as client,
        client.generate(None if arguments.image else text, messages=messages, **options) as generation,
    ):
        for delta in generation:
            if arguments.json:
                print(json.dumps(dataclasses.asdict(delta)), flush=True)
            else:
                print(harmless(delta.text) if sys.stdout.isatty() else delta.text, end="", flush=True)
    if not arguments.json:
        print()
    return 0


def _picture(given: str) -> str | bytes:
    """A file's bytes, or the URL. Raises CliError if there is no such file."""
    if given.partition(":")[0] in ("data", "http", "https"):
        return given
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise CliError(f"--image {given}: {error.strerror or error}", REFUSED) from None
