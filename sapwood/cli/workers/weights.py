"""`sapwood weights`: gives workers other weights while they serve, and shows which they have."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES
from sapwood.cli.workers.each_worker import add_worker_option, each_worker

if TYPE_CHECKING:  # at run time grpc is loaded only by the verbs that use it
    from sapwood.v1 import worker_pb2, worker_pb2_grpc

_IN_FLIGHT = ("retract", "keep", "abort")


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "weights",
        help="give workers other weights while they serve, or show which they have",
        description="Gives each worker the weights of a checkpoint between two steps, or shows which it has.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")

    def action(name: str, text: str) -> Any:
        made = actions.add_parser(name, help=text, allow_abbrev=False)
        add_worker_option(made)
        made.add_argument("--json", action="store_true", help="One JSON object a worker. [default: words]")
        made.set_defaults(run=run, action=name)
        return made

    action("show", "show which weights they have")
    update = action("update", "give them the weights of a folder or of a .safetensors file on their machines")
    back = action("rollback", "give them the weights back that the last update kept")
    update.add_argument("path", metavar="PATH", help="the folder or file")
    update.add_argument(
        "--partial", action="store_true", help="leave tensors that are not there as they are [default: no]"
    )
    for each in (update, back):
        each.add_argument("--version", default="", help="what to call them [default: a number]")
        each.add_argument("--keep", action="store_true", help="keep the present ones for a rollback [default: no]")
        each.add_argument(
            "--in-flight",
            choices=_IN_FLIGHT,
            default="retract",
            help="what becomes of requests that run: their KV is computed again, or kept, or they end [default: retract]",
        )


def run(arguments: argparse.Namespace) -> int:
    """Makes the call to every worker and shows what comes back; returns the exit code, raises CliError."""
    from sapwood.v1 import worker_pb2 as pb

    def call(worker: worker_pb2_grpc.WorkerStub) -> worker_pb2.WeightsState:
        if arguments.action == "show":
            return worker.GetWeights(pb.GetWeightsRequest()).weights
        request = pb.UpdateWeightsRequest(
            weight_version=arguments.version,
            keep_previous=arguments.keep,
            in_flight=f"IN_FLIGHT_REQUESTS_{arguments.in_flight.upper()}",
        )
        if arguments.action == "rollback":
            request.rollback = True
        else:
            request.path, request.partial = arguments.path, arguments.partial
        return worker.UpdateWeights(iter([request])).weights

    for address, state in each_worker(arguments.worker, call):
        fields = {"version": state.version, "number": state.number, "digest": state.digest.hex()}
        fields["can_roll_back"] = state.can_roll_back
        if arguments.json:
            print(json.dumps({"worker": address, **fields}))
        else:
            kept = ", the ones before are kept" if state.can_roll_back else ""
            digest = f", digest {state.digest.hex()[:12]}" if state.digest else ""
            print(f"{address}: weights {state.version}{digest}{kept}")
    return 0
