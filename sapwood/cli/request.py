"""Shared by `generate` and `chat`: the flags of a request, and server errors as one line with an exit code."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sapwood.cli.errors import FAILED, REFUSED, UNREACHABLE, CliError
from sapwood_common.settings.flags import add_option, number, whole_number

if TYPE_CHECKING:  # at run time grpc is loaded only by the verbs that use it
    from sapwood.client import Client
    from sapwood.generation import Options


_VALUES = ("model", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
"""Flags whose values go to the option of the same name."""


def add_request_options(
    parser: argparse.ArgumentParser, *, max_tokens: int | None = None, of_router: bool = True
) -> None:
    """Adds the flags of a request.

    Args:
        parser: Gets them.
        max_tokens: The default of that flag.
        of_router: Whether to add those that say where the router is and which of its models to ask.
    """
    if of_router:
        add_option(
            parser,
            "--address",
            "The router's gRPC host:port.",
            variable="SAPWOOD_ROUTER",
            default="127.0.0.1:50051",
        )
        add_option(parser, "--model", "Model to ask.", variable="SAPWOOD_MODEL", shown_default="the only one there is")
    add_option(
        parser, "--timeout", "Seconds an answer may take.", variable="SAPWOOD_TIMEOUT", parse=number, metavar="SECONDS"
    )
    server = "the server's"
    add_option(
        parser,
        "--max-tokens",
        "Most tokens to generate.",
        variable="SAPWOOD_MAX_TOKENS",
        default=max_tokens,
        parse=whole_number(1),
        metavar="N",
        shown_default="what the context holds" if max_tokens is None else None,
    )
    add_option(
        parser,
        "--temperature",
        "0 takes the likeliest token, more is more varied.",
        variable="SAPWOOD_TEMPERATURE",
        parse=number,
        metavar="T",
        shown_default=f"{server}, 1",
    )
    add_option(
        parser,
        "--top-k",
        "Keep only the K likeliest tokens.",
        variable="SAPWOOD_TOP_K",
        parse=whole_number(),
        shown_default="all",
    )
    add_option(
        parser,
        "--top-p",
        "Keep the smallest set of tokens of this probability.",
        variable="SAPWOOD_TOP_P",
        parse=number,
        shown_default=f"{server}, 1",
    )
    add_option(
        parser,
        "--min-p",
        "Drop tokens less likely than P times the likeliest.",
        variable="SAPWOOD_MIN_P",
        parse=number,
        shown_default=f"{server}, 0",
    )
    add_option(parser, "--seed", "The same seed gives the same answer.", variable="SAPWOOD_SEED", parse=whole_number())
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="End before this text; repeatable. [default: none]"
    )
    parser.add_argument(
        "--sampling",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="Any other field of SamplingParams (protos/sapwood/v1/common.proto), such as presence_penalty=0.5; repeatable."
        " [default: none]",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="Continue past the model's end tokens. [default: end there]"
    )


def add_structure_options(parser: argparse.ArgumentParser, *, tools: bool) -> None:
    """Adds the flags that say what the answer must be; ``tools`` adds those of tool calls."""
    parser.add_argument(
        "--json-schema",
        metavar="FILE",
        help="The answer is JSON that matches the schema in FILE; - for any JSON object. [default: free text]",
    )
    parser.add_argument("--regex", metavar="PATTERN", help="The answer matches this expression. [default: free text]")
    if tools:
        parser.add_argument(
            "--tools", metavar="FILE", help='Tools on offer: JSON in the form of OpenAI\'s "tools". [default: none]'
        )
        parser.add_argument(
            "--tool-choice",
            choices=("auto", "none", "required"),
            help="Whether the model calls them. [default: auto]",
        )


def structure_options(arguments: argparse.Namespace) -> Options:
    """The options that say what the answer must be. Raises CliError."""
    options: Options = {}
    if arguments.json_schema == "-":
        options["json_schema"] = {"type": "object"}
    elif arguments.json_schema is not None:
        options["json_schema"] = json.dumps(_read_json("--json-schema", arguments.json_schema))
    if arguments.regex is not None:
        options["regex"] = arguments.regex
    if file := vars(arguments).get("tools"):
        found = _read_json("--tools", file)
        if not isinstance(found, list):
            raise CliError(f"--tools: {file} holds no JSON array", REFUSED)
        options["tools"] = found
    if (choice := vars(arguments).get("tool_choice")) is not None:
        options["tool_choice"] = choice
    return options


def _read_json(flag: str, name: str) -> Any:
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        hint = "; it takes the name of a file" if name.lstrip().startswith(("{", "[")) else ""
        raise CliError(f"{flag}: cannot read {name}: {error.strerror}{hint}", REFUSED) from None
    except ValueError as error:
        raise CliError(f"{flag}: {name} is not JSON: {error}", REFUSED) from None


def open_client(arguments: argparse.Namespace) -> Client:
    """The client that ``--address`` and ``--timeout`` ask for. Raises CliError."""
    from sapwood.client import Client

    try:
        return Client(arguments.address, timeout=arguments.timeout)
    except ValueError as error:
        raise CliError(f"--{error}", REFUSED) from None


def request_options(arguments: argparse.Namespace) -> Options:
    """The options that were given; the server has defaults for the others."""
    options = _sampling(arguments.sampling)
    given = vars(arguments)
    options.update({name: given[name] for name in _VALUES if given[name] is not None})
    if arguments.stop:
        options["stop"] = arguments.stop
    if arguments.ignore_eos:
        options["ignore_eos"] = True
    return cast("Options", options)


def _sampling(given: list[str]) -> dict[str, Any]:
    """Settings given as NAME=JSON, by name. Raises CliError."""
    if not given:
        return {}
    from google.protobuf import json_format

    from sapwood.v1 import common_pb2

    message = common_pb2.SamplingParams()
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise CliError(f"--sampling {each}: is not NAME=JSON, such as presence_penalty=0.5", REFUSED)
        if name not in (fields := message.DESCRIPTOR.fields_by_name):
            similar = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
            hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(sorted(fields))}"
            flag = f"--{name.replace('_', '-')}"
            if flag in ("--stop", "--regex", "--json-schema", "--tools", "--tool-choice"):
                hint = f"{flag} is a flag of its own"
            raise CliError(f"--sampling {each}: there is no setting {name!r}; {hint}", REFUSED)
        try:
            json_format.ParseDict({name: json.loads(value)}, message)
        except json.JSONDecodeError as error:
            raise CliError(
                f"--sampling {each}: {value!r} is not JSON: {error}; a text stands in quotes", REFUSED
            ) from None
        except (ValueError, json_format.ParseError) as error:
            raise CliError(f"--sampling {each}: {str(error).splitlines()[0]}", REFUSED) from None
    if message.HasField("n"):
        raise CliError("--sampling n: one answer is shown", REFUSED)
    return {field.name: value for field, value in message.ListFields()}


@contextmanager
def failing_plainly(address: str, service: str = "router") -> Iterator[None]:
    """Turns errors of calls into a :class:`CliError`, which says what ``service`` is at ``address``."""
    import grpc

    from sapwood.errors import (
        DeadlineExceededError,
        InvalidArgumentError,
        NotFoundError,
        SapwoodError,
        UnavailableError,
        from_rpc_error,
    )

    try:
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(cast("grpc.Call", error)) from None
    except UnavailableError as error:
        raise CliError(_unreachable(error.message, address, service), UNREACHABLE) from None
    except DeadlineExceededError as error:
        if error.message == "Deadline Exceeded":  # grpc's words, not a service's
            raise CliError(f"the {service} at {address} has not answered in time, or is none", UNREACHABLE) from None
        raise CliError(str(error), UNREACHABLE) from None
    except (InvalidArgumentError, NotFoundError) as error:
        raise CliError(str(error), REFUSED) from None
    except SapwoodError as error:
        raise CliError(f"{error} (request {error.request_id})" if error.request_id else str(error), FAILED) from None
    except ValueError as error:  # refused before it was sent: beyond the field's type, or text that is not UTF-8
        raise CliError(f"wrong value: {error}", REFUSED) from None


def _unreachable(problem: str, address: str, service: str) -> str:
    """Says what is wrong where no call reaches ``service``, in fewer words than grpc where these are enough."""
    if address.startswith(("http://", "https://")):
        return f"{address} is a URL; this takes the {service}'s gRPC address, HOST:PORT"
    unconnected = problem.startswith("failed to connect")  # grpc's words, not a service's
    if unconnected and "parsing HTTP/2" in problem:
        return f"{address} speaks HTTP; this takes the {service}'s gRPC port"
    if unconnected and "Connection refused" in problem:
        return f"no {service} answers at {address}: connection refused; `sapwood up` starts one here"
    if unconnected and "SETTINGS frame" in problem:
        return f"what listens at {address} does not speak gRPC; this takes the {service}'s gRPC port"
    if problem.startswith("errors resolving"):
        return f"no {service} answers at {address}: it is not HOST:PORT, or there is no such host"
    start = "; `sapwood up` starts one here" if unconnected else ""
    return f"UNAVAILABLE: {problem} ({service}: {address}{start})"
