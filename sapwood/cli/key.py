"""`sapwood key`: makes an API key."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, REFUSED, CliError
from sapwood_common.contract.limits import MOST_PRIORITY, MOST_WEIGHT
from sapwood_common.settings.flags import whole_number


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "key",
        help="make an API key",
        description="Makes an API key, prints it once, and prints or adds to a file the line that the router's --api-keys "
        "file needs: the key's name and hash.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="whose it is: letters, digits and ._-")
    parser.add_argument("--file", type=Path, help="file to add the line to; without it the line goes to standard error")
    parser.add_argument("--per-minute", type=whole_number(1), metavar="N", help="most requests a minute")
    parser.add_argument("--tokens-per-minute", type=whole_number(1), metavar="N", help="most tokens a minute")
    parser.add_argument(
        "--weight", type=whole_number(1, MOST_WEIGHT), metavar="N", help="share of busy workers [default: 1]"
    )
    parser.add_argument(
        "--priority",
        type=whole_number(-MOST_PRIORITY, MOST_PRIORITY),
        metavar="N",
        help="highest priority that its requests may have [default: 0]",
    )
    parser.add_argument(
        "--objective",
        nargs="+",
        default=[],
        metavar="TARGET",
        help="when its tokens are to come: ttft-ms=500 for the first, tpot-ms=50 for each further one, in milliseconds; "
        "ttft-ms=200-2000 is what requests may name, and those that name nothing have the larger [default: none]",
    )
    parser.add_argument(
        "--operator", action="store_true", help="may change weights, put workers to sleep and pause them over HTTP"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Makes the key; returns the exit code, raises CliError."""
    from sapwood_common.errors import ConfigError
    from sapwood_common.tenants.api_keys import TARGETS, hash_key, make_key, parse_targets

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", arguments.name):
        raise CliError("name: 1 to 64 letters, digits and ._-", REFUSED)
    for target in arguments.objective:
        kind, _, value = target.partition("=")
        try:
            if kind not in TARGETS:
                raise ConfigError(f"--objective: {target!r} is none of {', '.join(f'{each}=' for each in TARGETS)}")
            parse_targets(value, f"--objective: {target!r} has no milliseconds such as 500 or 200-2000")
        except ConfigError as error:
            raise CliError(str(error), REFUSED) from None
    key = make_key()
    rate = f" {arguments.per_minute}" if arguments.per_minute else ""
    tokens = f" tokens={arguments.tokens_per_minute}" if arguments.tokens_per_minute else ""
    weight = f" weight={arguments.weight}" if arguments.weight else ""
    priority = f" priority={arguments.priority}" if arguments.priority else ""
    objective = "".join(f" {target}" for target in arguments.objective)
    operator = " operator" if arguments.operator else ""
    line = f"{arguments.name} {hash_key(key)}{rate}{tokens}{weight}{priority}{objective}{operator}\n"
    if arguments.file is None:
        sys.stderr.write(line)
    else:
        try:
            new = not arguments.file.exists()
            with arguments.file.open("a") as file:
                file.write(line)
            if new:
                arguments.file.chmod(0o600)
        except OSError as error:
            raise CliError(f"cannot write {arguments.file}: {error.strerror}") from None
    print(key)
    return 0
