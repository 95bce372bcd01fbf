"""`sapwood model drafter`: a draft model to try speculation with."""

from __future__ import annotations

import argparse
from typing import Any

from sapwood.cli.derived.verb import Fetch, add_verb, need_packages, writing
from sapwood.cli.errors import REFUSED, CliError
from sapwood_common.settings.flags import number, whole_number

_DESCRIPTION = """\
Writes a draft model for --worker-speculate draft:OUT: the first layers of a model, or all of it with noise on its weights, which
is a dial for how many of its drafts are right. Both are for trials: a small model of the same family that was trained drafts
better.
"""


def configure(nouns: Any, fetch: Fetch) -> None:
    """Adds the verb to those of `sapwood model`."""
    help_line = "make a draft model of a model's first layers, or of the model with noise"
    parser = add_verb(nouns, "drafter", run, fetch, help_line=help_line, description=_DESCRIPTION)
    parser.add_argument("--layers", type=whole_number(1), metavar="K", help="keep the first K layers [default: all]")
    parser.add_argument(
        "--noise",
        type=_share,
        default=0.0,
        metavar="X",
        help="add noise, in parts of each matrix's standard deviation [default: 0]",
    )


def run(fetch: Fetch, arguments: argparse.Namespace) -> int:
    """Makes it; returns the exit code, raises CliError."""
    if arguments.layers is None and not arguments.noise:
        raise CliError("--layers or --noise has to say how it differs from the model", REFUSED)
    need_packages("worker")
    from sapwood_worker.model.quantizer.drafter import make_drafter

    source = fetch(arguments.model, arguments.revision)
    with writing():
        layers = make_drafter(source, arguments.out, layers=arguments.layers, noise=arguments.noise)
    print(f"{arguments.out}: {layers} layers; sapwood up {arguments.model} --worker-speculate draft:{arguments.out}")
    return 0


def _share(text: str) -> float:
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
