"""`sapwood up`: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES, FAILED, INTERRUPTED, REFUSED, CliError
from sapwood.cli.local.cluster_file import add_file_flag, shown_services
from sapwood.cli.local.gpus import share_gpus
from sapwood.cli.local.running import Record, detach
from sapwood.cli.terminal import Terminal, open_terminal
from sapwood_common.settings.flags import PORT, add_option, number, one_of, whole_number

# `sapwood up --no-router`: one worker that answers HTTP on one port. The services around it listen only on Unix sockets.
#
# The HTTP front is the router's, with one worker that never changes and nothing to choose: the APIs, statuses and flags are the
# same to the letter, and there is one edge to look after.
FRONT = "http"
"""The name in logs of the process that answers HTTP."""
# On Unix sockets in a folder of one's own any number is free.
_FRONT, _TOKENIZER, _TOKENIZER_METRICS, _WORKER, _WORKER_METRICS = range(1, 6)


def settings_alone(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of router, tokenizer and worker, by field.

    Args:
        arguments: Those of `sapwood up`.
        folder: For the sockets.

    Raises:
        CliError: A flag was given that means nothing here.
    """
    if arguments.workers not in (None, 1):
        raise CliError(f"--workers {arguments.workers}: with --no-router there is one worker", REFUSED)
    for flag in ("policy", "tokenizer_port", "worker_port"):
        if vars(arguments)[flag] is not None:
            raise CliError(f"--{flag.replace('_', '-')} has no effect with --no-router", REFUSED)
    if None not in (arguments.port, arguments.http_port) and arguments.port != arguments.http_port:
        raise CliError("--port and --http-port both mean the one port that --no-router leaves", REFUSED)
    port = arguments.http_port or arguments.port
    host = f"unix:{folder}/s"
    # Only this user can open the sockets, and this user can stop the processes anyway.
    metrics = [f"{host}:{_TOKENIZER_METRICS}", f"{host}:{_WORKER_METRICS}"]
    return {
        "router": {
            "host": host,
            "port": _FRONT,
            "http_host": arguments.host or "127.0.0.1",
            "http_port": 0 if port is None and arguments.ports == "auto" else port,
            "policy": "round_robin",
            "metrics_of": metrics,
        },
        "tokenizer": {"host": host, "port": _TOKENIZER, "metrics_port": _TOKENIZER_METRICS},
        "worker": {"host": host, "port": _WORKER, "metrics_port": _WORKER_METRICS},
    }


if TYPE_CHECKING:  # at run time only this verb imports them, since they need the services' packages
    from sapwood.cli.services import Services

NAMES = ("up", "serve", "config")
"""The verbs that take the flags of the services; `serve` is what vLLM calls `up`."""

# For each extra one package that only it installs.
_NEEDED = {"httptools": "router", "tokenizers": "tokenizer", "torch": "worker"}
# Seconds within which two signals count as one: `timeout`, or a terminal and `kill`, send two for one wish to stop.
_SAME_WISH_SECONDS = 0.5
_WORKERS = 2
_ROLES = ("both", "prefill", "decode")
_ERROR = re.compile(r"\S+ ERROR +\S+ \[\S*\] (.*)")
"""A service's line about an error; the group is what it says."""
_COLOURS = {"router": "magenta", FRONT: "magenta", "tokenizer": "yellow"}
_WORKER_COLOURS = ("cyan", "green", "blue", "bright_cyan", "bright_green", "bright_blue")


def configure(verbs: Any, *, with_services: bool) -> None:
    """Adds the verb to the parser.

    Args:
        verbs: The parser's verbs.
        with_services: Whether to add the services' flags, which takes half a second and the services' packages.
    """
    parser: argparse.ArgumentParser = verbs.add_parser(
        "up",
        aliases=("serve",),
        usage="sapwood up [MODEL] [FLAG ...]",
        help="start tokenizer, workers and router here",
        description="Starts tokenizer, workers and router as processes of this machine, prints where they answer and "
        "follows their logs. A tokenizer or worker that ends is started again, at most five times in ten minutes. Ctrl-C or "
        "SIGTERM lets running requests finish and stops all; a second one stops at once. "
        "Every flag of a service is taken with its name before it: --worker-max-running 8 is a worker's --max-running 8. "
        "A setting without a flag comes from the service's own variable (SAPWOOD_WORKER_MAX_RUNNING) or default.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    _add_flags(parser, with_services=with_services)
    parser.add_argument(
        "-d",
        "--detach",
        action="store_true",
        help="Return once it answers and leave it running: `sapwood ps` lists it, `sapwood logs` shows what it writes, `sapwood "
        "stop` ends it. [default: stay in the foreground]",
    )
    parser.set_defaults(run=run)
    shown: argparse.ArgumentParser = verbs.add_parser(
        "config",
        usage="sapwood config [MODEL] [FLAG ...]",
        help="print the cluster that flags, variables and a file make",
        description="Prints what `sapwood up` would start with these flags, as a file for `sapwood up -c FILE`. Nothing is "
        "started or fetched. Credentials in URLs are left out.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    _add_flags(shown, with_services=with_services)
    shown.add_argument("--all", action="store_true", help="Also what is as it is by default. [default: what is not]")
    shown.set_defaults(run=run_config)


def _add_flags(parser: argparse.ArgumentParser, *, with_services: bool) -> None:
    up = "SAPWOOD_UP_"
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="The same as --model.")
    add_option(
        parser,
        "--model",
        "Of tokenizer and workers: demo, demo-base, a model of the hub (owner/name or owner/name:file.gguf), a .gguf file, a "
        "Hugging Face directory or a URL (s3://bucket/folder). What is not here is fetched.",
        variable=up + "MODEL",
        shown_default="demo",
    )
    add_option(
        parser,
        "--revision",
        "Branch, tag or commit of a model of the hub.",
        variable=up + "REVISION",
        shown_default="main",
    )
    add_option(
        parser,
        "--served-model-name",
        "Name that clients use for the model.",
        variable=up + "SERVED_MODEL_NAME",
        shown_default="the hub's, or the file's own",
        metavar="NAME",
    )
    add_option(
        parser,
        "--workers",
        "How many.",
        variable=up + "WORKERS",
        parse=whole_number(1),
        metavar="N",
        shown_default="2; with --no-router 1",
    )
    add_option(
        parser,
        "--roles",
        "What each worker does of a request, with commas between them, in place of --workers: prefill,decode,decode starts one "
        "that computes prompts for two that generate; both does all.",
        variable=up + "ROLES",
        parse=_roles,
        metavar="ROLES",
        shown_default="both, each",
    )
    parser.add_argument(
        "--no-router",
        action="store_true",
        default=bool(os.environ.get("SAPWOOD_UP_NO_ROUTER")),
        help="One worker that answers HTTP itself, on the one port that --port (or --http-port) names: 8000 if neither is "
        "given. Nothing else listens on a port. [default: off]",
    )
    add_option(
        parser,
        "--tensor-parallel",
        "Processes that each worker's model is split over, with a GPU each where there are GPUs.",
        variable=up + "TENSOR_PARALLEL",
        parse=whole_number(1),
        metavar="N",
        shown_default="1",
    )
    add_option(
        parser,
        "--threads",
        "Threads of each worker's computations.",
        variable=up + "THREADS",
        parse=whole_number(1),
        metavar="N",
        shown_default="cores / workers",
    )
    add_option(
        parser,
        "--policy",
        "How the router chooses a worker; --router-policy names them.",
        variable=up + "POLICY",
        shown_default="cache_aware",
    )
    add_option(
        parser,
        "--random-seed",
        "Makes runs repeatable: requests without a seed get seeds derived from this one, in the order in which they come.",
        variable=up + "RANDOM_SEED",
        parse=whole_number(0),
        metavar="N",
        shown_default="none: they are random",
    )
    add_option(
        parser,
        "--host",
        "Address the router listens on; 0.0.0.0 for all. The other services listen on 127.0.0.1.",
        variable=up + "HOST",
        shown_default="127.0.0.1",
    )
    for flag, what, default in (
        ("--port", "The router's gRPC port.", 50051),
        ("--http-port", "The router's HTTP port (OpenAI API).", 8000),
        ("--tokenizer-port", "The tokenizer's port.", 50052),
        ("--worker-port", "The first worker's port; the others follow it.", 50061),
    ):
        variable = up + flag.strip("-").replace("-", "_").upper()
        add_option(parser, flag, what, variable=variable, shown_default=str(default), parse=PORT)
    add_option(
        parser,
        "--ports",
        "fixed takes the ports named by the flags above or their defaults; auto takes free ones and prints them, where no "
        "flag names one.",
        variable=up + "PORTS",
        default="fixed",
        parse=one_of("fixed", "auto"),
        metavar="{fixed,auto}",
    )
    add_option(
        parser,
        "--log-level",
        "Least severe log line shown, of all services.",
        variable=up + "LOG_LEVEL",
        shown_default="info",
        parse=one_of("debug", "info", "warning", "error"),
        metavar="{debug,info,warning,error}",
    )
    add_option(
        parser,
        "--drain-timeout",
        "Seconds that running requests get to finish after Ctrl-C.",
        variable=up + "DRAIN_TIMEOUT",
        shown_default="30.0",
        parse=number,
        metavar="SECONDS",
    )
    add_file_flag(parser)
    if with_services:
        _check_extras()
        from sapwood.cli.services import add_service_flags

        add_service_flags(parser)


def services_of(words: list[str]) -> Services:
    """The services that these flags ask for. Raises CliError."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    _add_flags(parser, with_services=True)
    return _services(parser.parse_args(words))


def run_config(arguments: argparse.Namespace) -> int:
    """Prints the cluster; returns the exit code, raises CliError."""
    if arguments.no_router:
        _services(arguments, Path())  # refuses what has no meaning without a router
        arguments.positional_model, arguments.workers = None, 1
    print(shown_services(_services(arguments), everything=arguments.all, alone=arguments.no_router), end="")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb until it is stopped; returns the exit code, raises CliError."""
    from sapwood.cli.local.checks import claimed_ports
    from sapwood_common.network.socket_folder import SocketFolder  # of the services' packages

    if arguments.detach:
        _services(arguments)  # what is wrong with the flags is said here
        return detach([word for word in arguments.words if word not in ("--detach", "-d")])
    folder = SocketFolder("sapwood-up-") if arguments.no_router else None
    try:
        services = _services(arguments, None if folder is None else folder.path)
        with claimed_ports(services):
            return _checked(services)
    finally:
        if folder is not None:
            folder.remove()


def _checked(services: Services) -> int:
    """Serves if nothing else is wrong; returns the exit code, raises CliError."""
    from sapwood.cli.fetch import fetch_models
    from sapwood.cli.local.checks import check_files, check_model
    from sapwood_common.models.model_files import model_name

    check_files(services)
    fetch_models(services)
    check_model(services)
    terminal = open_terminal(sys.stdout)
    name = services.worker.config.served_model_name or model_name(services.worker.config.model)
    try:
        with Record(name) as record:
            return asyncio.run(_serve(services, terminal, record))
    finally:
        terminal.close()


def _services(arguments: argparse.Namespace, sockets: Path | None = None) -> Services:
    """The services that the flags ask for. Raises CliError.

    Args:
        arguments: The flags.
        sockets: With --no-router, the folder for all that listens on no port.
    """
    from sapwood.cli.services import read_services
    from sapwood_common.cores import usable_cores

    def port(given: int | None) -> int | None:
        return 0 if given is None and arguments.ports == "auto" else given

    if arguments.positional_model is not None:
        if arguments.model not in (None, os.environ.get("SAPWOOD_UP_MODEL")):
            raise CliError(
                f"MODEL ({arguments.positional_model}) and --model ({arguments.model}) are both given", REFUSED
            )
        arguments.model = arguments.positional_model
    of_all = {"log_level": arguments.log_level, "drain_timeout": arguments.drain_timeout}
    drawing = {"random_seed": arguments.random_seed}
    of_model = {
        "model": arguments.model,
        "revision": arguments.revision,
        "served_model_name": arguments.served_model_name,
    }
    if sockets is not None:
        own, workers, front = settings_alone(arguments, sockets), 1, FRONT
        if arguments.roles:
            raise CliError("--roles with --no-router: one worker does all", REFUSED)
    else:
        workers, front = arguments.workers or len(arguments.roles or ()) or _WORKERS, "router"
        if arguments.roles and workers != len(arguments.roles):
            raise CliError(f"--workers {workers} and --roles of {len(arguments.roles)} workers are both given", REFUSED)
        own = {
            "router": {
                "policy": arguments.policy,
                "host": arguments.host,
                "port": port(arguments.port),
                "http_port": port(arguments.http_port),
            },
            "tokenizer": {"port": port(arguments.tokenizer_port)},
            "worker": {"port": port(arguments.worker_port)},
        }
    computing = {"threads": arguments.threads, "tensor_parallel": arguments.tensor_parallel}
    services = read_services(
        arguments,
        router=of_all | drawing | own["router"],
        tokenizer=of_all | of_model | own["tokenizer"],
        worker=of_all | of_model | computing | drawing | own["worker"],
        workers=workers,
        front=front,
        roles=arguments.roles or (),
    )
    if services.roles and "role" in services.worker.given:
        raise CliError("--roles and --worker-role are both given", REFUSED)
    if "threads" not in services.worker.config.model_fields_set:
        services.worker.given["threads"] = max(1, usable_cores() // workers)
    config = services.worker.config
    return replace(services, gpus=share_gpus(workers, config.ranks // config.nnodes or 1, config.device))


def _roles(text: str) -> tuple[str, ...]:
    """The roles of a list. Raises ArgumentTypeError: one of them is none."""
    return tuple(map(one_of(*_ROLES), text.split(",")))


def _check_extras() -> None:
    missing = [extra for package, extra in _NEEDED.items() if importlib.util.find_spec(package) is None]
    if missing:
        raise CliError(f"`sapwood up` needs the services: pip install 'sapwood[{','.join(missing)}]'")


async def _serve(services: Services, terminal: Terminal, record: Record) -> int:
    from sapwood.cli.local.cluster import Cluster, DiedError
    from sapwood.cli.local.welcome import welcome

    start = time.monotonic()

    def on_line(name: str, line: str) -> None:
        number = name.rpartition("-")[2]
        if not ready and (error := _ERROR.match(line)):
            first = said.setdefault(error[1], name)
            if number.isdigit() and first != name:  # what is wrong for one worker is wrong for all
                return
        colour = _WORKER_COLOURS[int(number) % len(_WORKER_COLOURS)] if number.isdigit() else _COLOURS[name]
        if not deaf:
            try:
                terminal.line(line, label=f"{name:<9}", colour=colour)
            except OSError:  # the reader of our output has gone: stop rather than leave an unseen cluster running
                deaf.append(name)
                stopping.set()

    deaf: list[str] = []
    said: dict[str, str] = {}
    ready: list[Any] = []
    stopping = asyncio.Event()
    killing = asyncio.Event()
    cluster = Cluster(services, on_line, terminal.status)

    first_signal = 0.0

    def on_signal() -> None:
        nonlocal first_signal
        if not stopping.is_set():
            first_signal = time.monotonic()
            stopping.set()
        elif time.monotonic() - first_signal > _SAME_WISH_SECONDS:
            killing.set()
            cluster.kill()

    for ending in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(ending, on_signal)

    async def live() -> None:
        workers, threads = services.workers, services.worker.given.get("threads", services.worker.config.threads)
        terminal.line(
            f"starting tokenizer, {workers} worker{'s' * (workers > 1)} with {threads or 'all'} "
            f"thread{'s' * (threads != 1)}{' each' * (workers > 1)}, and {services.front} on model {services.worker.config.model}"
        )
        endpoints = await cluster.start()
        ready.append(endpoints)
        terminal.line(welcome(services, endpoints, time.monotonic() - start))
        secure = services.router.config.tls_cert is not None
        record.answers(f"http{'s' * secure}://{endpoints.http}", endpoints.grpc)
        await cluster.watch()

    life = asyncio.create_task(live())
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
    died = life.exception() if life.done() else None
    if died is not None and not isinstance(died, DiedError):
        cluster.kill()
        raise died
    life.cancel()
    if died is not None:
        terminal.line(f"{died.what}: stopping the others")
    await cluster.stop()
    if died is not None and not ready and any("cannot listen on" in text for text in said):
        from sapwood.cli.local.checks import check_ports

        check_ports(services)  # another `up` was quicker: this names the flag
    if died is not None:
        raise CliError(str(died) if ready or deaf else f"{died.what}; the lines above say why", FAILED)
    terminal.line("stopped")
    return INTERRUPTED if killing.is_set() else 0
