"""`sapwood router`: what an operator asks of a running router."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli import top
from sapwood.cli.errors import EXIT_CODES, REFUSED, CliError
from sapwood.cli.request import failing_plainly
from sapwood.cli.top import table, worker_rows
from sapwood_common.settings.flags import add_option, number

if TYPE_CHECKING:  # grpc is loaded only by the verbs that use it
    import grpc

    from sapwood.v1 import router_pb2, router_pb2_grpc

_TIMEOUT = 10.0


def configure(verbs: Any) -> None:
    """Adds the verb and its own verbs to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "router",
        help="look after a running router",
        description="Asks a running router, or tells it.",
        epilog=EXIT_CODES,
    )
    groups = parser.add_subparsers(metavar="WHAT", required=True)
    workers = groups.add_parser("workers", help="its workers", epilog=EXIT_CODES)
    actions = workers.add_subparsers(metavar="ACTION", required=True)
    add_router_verb(actions, "list", "show the workers and how they are", _list)
    add = add_router_verb(actions, "add", "add a worker", _register)
    _add_address(add)
    add.add_argument(
        "--lease",
        type=number,
        metavar="SECONDS",
        help="Removed again after this time, unless it is added again before. [default: stays]",
    )
    drain = add_router_verb(actions, "drain", "give a worker no new requests; what runs on it finishes", _drain)
    _add_address(drain)
    drain.add_argument("--undo", action="store_true", help="Give it requests again. [default: no]")
    _add_address(
        add_router_verb(actions, "remove", "forget a worker; what runs on it continues on another worker", _remove)
    )
    route = groups.add_parser("route", help="its choices", epilog=EXIT_CODES)
    route_actions = route.add_subparsers(metavar="ACTION", required=True)
    explain = add_router_verb(route_actions, "explain", "show where a text would go, and why", _explain)
    explain.add_argument("text", metavar="TEXT", help="the prompt")
    explain.add_argument("--model", metavar="NAME", help="The model asked for, where there are several.")
    explain.add_argument("--session-id", metavar="ID", help="The session id that the policy consistent_hash hashes.")
    explain.add_argument("--tenant", metavar="NAME", help="The prompt's tenant, if the router requires no API keys.")
    for place in (groups, verbs):
        top.add_flags(add_router_verb(place, "top", "watch the router and its workers", _top))


def add_router_verb(
    actions: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Adds a verb with the flags that say where the router is.

    Args:
        actions: Gets the verb.
        name: The verb.
        text: What it does.
        run: Does it.
    """
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=EXIT_CODES, allow_abbrev=False
    )
    add_option(
        parser,
        "--address",
        "The router's gRPC host:port; its admin port, if it has one.",
        variable="SAPWOOD_ROUTER",
        default="127.0.0.1:50051",
    )
    add_option(
        parser,
        "--ca",
        "PEM file with the CA of the router's certificate; turns TLS on.",
        variable="SAPWOOD_CA",
        parse=Path,
        metavar="FILE",
    )
    for flag, variable, text in (
        ("--cert", "SAPWOOD_CERT", "PEM file with the certificate to show the router, where it asks for one (mTLS)."),
        ("--key", "SAPWOOD_CERT_KEY", "PEM file with that certificate's private key."),
    ):
        add_option(parser, flag, text, variable=variable, parse=Path, metavar="FILE")
    add_option(
        parser,
        "--server-name",
        "Name that the certificate must be for, where --address is another.",
        variable="SAPWOOD_SERVER_NAME",
        metavar="NAME",
    )
    parser.set_defaults(run=run)
    return parser


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="HOST:PORT", help="the worker's address")


def _channel(arguments: argparse.Namespace) -> grpc.Channel:
    import grpc

    own = (arguments.key, arguments.cert)
    if (own[0] is None) != (own[1] is None) or (own[0] is not None and arguments.ca is None):
        raise CliError("--cert and --key go together, and with --ca", REFUSED)
    if arguments.ca is None:
        return grpc.insecure_channel(arguments.address)
    try:
        files = [None if file is None else file.read_bytes() for file in (arguments.ca, *own)]
    except OSError as error:
        raise CliError(f"cannot read {error.filename}: {error.strerror}", REFUSED) from None
    credentials = grpc.ssl_channel_credentials(*files)
    name = arguments.server_name
    options = () if name is None else (("grpc.ssl_target_name_override", name),)
    return grpc.secure_channel(arguments.address, credentials, options)


@contextmanager
def router_stub(arguments: argparse.Namespace) -> Iterator[router_pb2_grpc.RouterStub]:
    """A stub of the router that the flags name."""
    from sapwood.v1 import router_pb2_grpc

    with failing_plainly(arguments.address), _channel(arguments) as channel:
        yield router_pb2_grpc.RouterStub(channel)


def _list(arguments: argparse.Namespace) -> int:
    from sapwood.generation import role_name
    from sapwood.v1 import router_pb2

    with router_stub(arguments) as router:
        workers = router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_TIMEOUT).workers
    print("\n".join(table(worker_rows(workers))))
    for worker in workers:
        if worker.proposed_because:
            role = role_name(worker.proposed_role)
            print(f"{worker.address} had better be for {role}: {worker.proposed_because}")
    return 0


def _register(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import router_pb2

    with router_stub(arguments) as router:
        request = router_pb2.RegisterWorkerRequest(address=arguments.worker, lease_seconds=arguments.lease)
        router.RegisterWorker(request, timeout=_TIMEOUT)
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import router_pb2

    with router_stub(arguments) as router:
        request = router_pb2.DrainWorkerRequest(address=arguments.worker, undo=arguments.undo)
        left = router.DrainWorker(request, timeout=_TIMEOUT).in_flight
    if not arguments.undo:
        print(f"{left} requests of this router are still running on it")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import router_pb2

    with router_stub(arguments) as router:
        router.RemoveWorker(router_pb2.RemoveWorkerRequest(address=arguments.worker), timeout=_TIMEOUT)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from sapwood.generation import role_name
    from sapwood.v1 import router_pb2

    with router_stub(arguments) as router:
        asked = router_pb2.RouterGenerateRequest(text=arguments.text, model=arguments.model)
        caller = (("x-session-id", arguments.session_id), ("x-tenant", arguments.tenant))
        answer = router.ExplainRoute(
            router_pb2.ExplainRouteRequest(request=asked),
            metadata=tuple((key, value) for key, value in caller if value),
            timeout=_TIMEOUT,
        )
        workers = router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_TIMEOUT).workers
    candidates = {item.address for item in answer.candidates}
    rows = [("", "WORKER", "CACHED", "REQUESTS", "QUEUED TOKENS", "COST", "EXCLUDED")]
    for item in answer.candidates:
        cost = f"{item.cost:.0f}" if item.HasField("cost") else "-"
        mark = "->" if item.address == answer.chosen else ""
        cached = f"{item.cached_tokens} of {answer.prompt_tokens}"
        rows.append((mark, item.address, cached, str(item.requests), str(item.queued_tokens), cost, item.excluded))
    print("\n".join(table(rows)))
    print(f"reason: {answer.reason} ({answer.policy})")
    if answer.disaggregated:
        print(f"{answer.chosen} computes the prompt, {answer.decode_chosen} generates: {answer.disaggregation}")
    elif any(role_name(worker.role) != "both" for worker in workers if worker.address in candidates):
        print(f"it does all of it: {answer.disaggregation}")
    if answer.estimates:
        print("\n".join(table(_estimate_rows(answer.estimates))))
    for shadow in answer.shadows:
        print(f"{shadow.policy} would choose {shadow.chosen}: {shadow.reason}")
    return 0


def _estimate_rows(estimates: Iterable[router_pb2.RouteEstimate]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("PREFILL BY", "GENERATES", "PREFILL", "TRANSFER", "GENERATE", "OTHERS", "SECONDS")]
    for each in estimates:
        parts = (each.prefill_seconds, each.transfer_seconds, each.generate_seconds, each.others_seconds)
        seconds = (f"{part:.3f}" for part in (*parts, sum(parts)))
        rows.append((each.worker, each.decode_worker or each.worker, *seconds))
    return rows


def _top(arguments: argparse.Namespace) -> int:
    return top.run(arguments, router_stub)
