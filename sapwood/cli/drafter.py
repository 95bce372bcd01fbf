"""`sapwood model drafter`: a draft model to try speculation with."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, CliError
from sapwood_common.settings.flags import whole_number

_DESCRIPTION = """\
Writes a draft model for --worker-speculate draft:OUT: the first layers of a model, or all of it with noise on its weights, which
is a dial for how many of its drafts are right. Both are for trials: a small model of the same family that was trained drafts
better.
"""


def configure(nouns: Any, fetch: Callable[[str, str | None], Path]) -> None:
    """Adds the verb to those of `sapwood model`; ``fetch`` makes sure that a model is here, and says where."""
    parser: argparse.ArgumentParser = nouns.add_parser(
        "drafter",
        help="make a draft model of a model's first layers, or of the model with noise",
        description=_DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="IN", help="a Hugging Face directory, or a model of the hub (fetched first)")
    parser.add_argument("out", metavar="OUT", type=Path, help="the new directory")
    parser.add_argument("--layers", type=whole_number(1), metavar="K", help="keep the first K layers [default: all]")
    parser.add_argument(
        "--noise",
        type=_share,
        default=0.0,
        metavar="X",
        help="add noise, in parts of each matrix's standard deviation [default: 0]",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub [default: main]")
    parser.set_defaults(run=partial(run, fetch))


def run(fetch: Callable[[str, str | None], Path], arguments: argparse.Namespace) -> int:
    """Makes it; returns the exit code, raises CliError."""
    if arguments.layers is None and not arguments.noise:
        raise CliError("--layers or --noise has to say how it differs from the model", REFUSED)
    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise CliError(f"{package} is not installed: pip install 'sapwood[worker]'", REFUSED)
    from sapwood_common.errors import ConfigError
    from sapwood_worker.model.quantizer.drafter import make_drafter

    source = fetch(arguments.model, arguments.revision)
    try:
        layers = make_drafter(source, arguments.out, layers=arguments.layers, noise=arguments.noise)
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from None
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", FAILED) from None
    print(f"{arguments.out}: {layers} layers; sapwood up {arguments.model} --worker-speculate draft:{arguments.out}")
    return 0


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
