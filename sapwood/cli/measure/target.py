"""Shared by `bench` and `eval`: the flags that say which server is asked."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sapwood.cli.errors import REFUSED, UNREACHABLE, CliError
from sapwood_common.settings.flags import add_option, number

if TYPE_CHECKING:  # at run time the libraries are loaded only by the verbs that use them
    from sapwood.bench.targets.open_target import Where

Found = TypeVar("Found")

_NEEDED = "aiohttp"


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group("which server")
    add_option(
        group,
        "--url",
        "An OpenAI-compatible server, with or without /v1, /v1/completions or /v1/chat/completions.",
        variable="SAPWOOD_URL",
        default="http://127.0.0.1:8000",
    )
    group.add_argument(
        "--grpc", metavar="HOST:PORT", help="A Sapwood router's gRPC port, instead of --url. [default: none]"
    )
    group.add_argument(
        "--api",
        choices=("completions", "chat"),
        help="Whether prompts are texts to continue with or messages to answer. [default: as --url says, else completions]",
    )
    group.add_argument("--model", metavar="NAME", help="Which model. [default: the first that the server lists]")
    group.add_argument(
        "--api-key", metavar="KEY", help="Sent with each request. [SAPWOOD_API_KEY or OPENAI_API_KEY; default: none]"
    )
    group.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM file with the CA of the server's certificate; with --grpc it turns TLS on. [default: the system's]",
    )
    group.add_argument(
        "--timeout", type=positive, default=600.0, metavar="SECONDS", help="That a request may take. [default: 600]"
    )


def where_of(arguments: argparse.Namespace) -> Where:
    """The server that the flags name. Raises CliError, also where the libraries are missing."""
    if importlib.util.find_spec(_NEEDED) is None:
        raise CliError("this needs more packages: pip install 'sapwood[bench]'", REFUSED)
    from sapwood.bench.targets.open_target import Where

    if arguments.ca is not None and not arguments.ca.is_file():
        raise CliError(f"--ca: cannot read {arguments.ca}", REFUSED)
    where = Where(
        url=None if arguments.grpc else arguments.url,
        grpc=arguments.grpc or "",
        api=arguments.api,
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("SAPWOOD_API_KEY") or os.environ.get("OPENAI_API_KEY"),
        ca=arguments.ca,
        timeout=arguments.timeout,
    )
    try:
        assert where.api_used
    except ValueError as error:
        raise CliError(f"--url: {error}", REFUSED) from None
    return where


def run_fast(main: Coroutine[Any, Any, Found]) -> Found:
    """Runs a coroutine on uvloop, where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)


@contextmanager
def telling_errors() -> Iterator[None]:
    """Raises CliError where the server cannot be asked, or a file or the data cannot be used."""
    from sapwood.bench.data.json_lines import DataError
    from sapwood.bench.targets.target import TargetError

    try:
        yield
    except TargetError as error:
        raise CliError(str(error), UNREACHABLE) from None
    except (DataError, ValueError) as error:
        raise CliError(str(error), REFUSED) from None
    except OSError as error:
        raise CliError(f"cannot read {error.filename or 'a file'}: {error.strerror or error}", REFUSED) from None


def allow_many_connections() -> None:
    """Lets this process have as many files and connections open as it may: each request under way is one."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def positive(text: str) -> float:
    """A parser of numbers over 0."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not over 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A parser of JSON objects."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found
