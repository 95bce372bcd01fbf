"""The `sapwood` command: verbs, and how errors leave it."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version

from sapwood.cli import cache, chat, generate, key, model, router, up, worker
from sapwood.cli.errors import EXIT_CODES, INTERRUPTED, CliError


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each verb sets ``run`` to its function."""
    parser = argparse.ArgumentParser(
        prog="sapwood",
        description="Runs Sapwood on this machine and talks to it.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sapwood {version('sapwood')}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, title="verbs")
    for verb in (up, generate, chat, model, key, router, worker, cache):
        verb.configure(verbs)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code; see ``sapwood.cli.errors`` for what it means."""
    arguments = build_parser().parse_args(argv)
    try:
        exit_code: int = arguments.run(arguments)
    except CliError as failure:
        print(f"sapwood: {failure.message}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
