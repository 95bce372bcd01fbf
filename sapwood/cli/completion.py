"""`sapwood completion SHELL`: what a shell reads to complete verbs and flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sapwood.cli.errors import EXIT_CODES, CliError


def configure(verbs: Any, build_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the verb to the parser.

    Args:
        verbs: The parser's verbs.
        build_parser: Builds the whole parser, flags of the services included.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        "completion",
        help="print what a shell needs to complete verbs and flags",
        description='Prints a script: eval "$(sapwood completion bash)" in ~/.bashrc, or `sapwood completion zsh > '
        '"${fpath[1]}/_sapwood"`.',
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))

    def run(arguments: argparse.Namespace) -> int:
        try:
            import shtab
        except ImportError:
            raise CliError("`sapwood completion` needs shtab: pip install 'sapwood[cli]'") from None
        print(shtab.complete(build_parser(), arguments.shell))
        return 0

    parser.set_defaults(run=run)
