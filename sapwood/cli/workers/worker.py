"""`sapwood worker`: pauses, drains, flushes and profiles workers, pins prefixes, shows the model and the load."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES
from sapwood.cli.terminal import one_line
from sapwood.cli.workers.each_worker import add_worker_option, each_worker
from sapwood_common.settings.flags import whole_number

if TYPE_CHECKING:  # at run time grpc is loaded only by the verbs that use it
    from google.protobuf.message import Message

    from sapwood.v1 import worker_pb2_grpc

Answer = dict[str, object]

_LOAD = (
    *("running_requests", "running_tokens", "waiting_requests", "queued_tokens"),
    *("used_pages", "evictable_pages", "num_pages"),
)
_INFO = (
    *("model", "architecture", "dtype", "context_length", "max_running", "max_step_tokens", "page_size", "num_pages"),
    *("weights", "prefill_attention", "decode_attention", "attention_reason", "sizes_reason", "tensor_parallel"),
    *("pipeline_parallel", "attention_ranks", "all_reduce", "speculate"),
)


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "worker",
        help="pause, drain, flush or profile workers",
        description="Operates workers. Each answer is one line, after the worker's address; info has a line for each fact.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")

    def action(name: str, text: str, *, to: Any = actions) -> Any:
        made = to.add_parser(name.rpartition(" ")[2], help=text, allow_abbrev=False)
        add_worker_option(made)
        made.add_argument("--json", action="store_true", help="One JSON object a worker. [default: words]")
        made.set_defaults(run=run, action=name)
        return made

    action(
        "info",
        "show the model, its cache, what its weights are in, what computes its attention, how much runs at once, and why",
    )
    action("load", "show what runs, what waits and how full the cache is")
    action("experts", "show how a mixture of experts has spread its tokens")
    pause = action("pause", "compute nothing until resume; requests may still come")
    pause.add_argument("--retract", action="store_true", help="also take the running requests' pages [default: no]")
    action("resume", "continue after a pause")
    for name, text in (
        ("sleep", "give memory back until wake, and refuse requests meanwhile"),
        ("wake", "take memory again after a sleep"),
    ):
        action(name, text).add_argument(
            "--memory", choices=("all", "weights", "kv-cache"), default="all", help="which [default: all]"
        )
    action("drain", "refuse new requests and wait for those that run")
    role = action("role", "change what a worker does of a request: both, or prefill or decode for others")
    role.add_argument("role", choices=("both", "prefill", "decode"), metavar="ROLE", help="both, prefill or decode")
    action("flush", "forget every prefix that no request and no pin holds, in memory of device and host")
    pin = action("pin", "keep what is cached of a prefix")
    pin.add_argument("name", metavar="NAME", help="what to call it; a pin of this name is replaced")
    pin.add_argument("--token-ids", required=True, type=_token_ids, metavar="IDS", help="the prefix: 2,818,5279")
    pin.add_argument("--salt", default="", help="the cache salt of the requests that are to find it [default: none]")
    pin.add_argument("--seconds", type=whole_number(), help="for how long [default: until it is unpinned]")
    action("unpin", "let go of a pinned prefix").add_argument("name", metavar="NAME", help="the pin's name")
    action("abort", "end a running request").add_argument("request_id", metavar="ID", help="the request's id")
    profile = actions.add_parser("profile", help="record a Chrome trace of what a worker computes", allow_abbrev=False)
    profiles = profile.add_subparsers(metavar="ACTION", required=True, title="actions")
    start = action("profile start", "begin to record", to=profiles)
    start.add_argument("--folder", default="", help="on the worker's machine [default: a new temporary one]")
    action("profile stop", "end the recording and show where it is", to=profiles)


def run(arguments: argparse.Namespace) -> int:
    """Makes the call to every worker and shows what comes back; returns the exit code, raises CliError."""
    for address, answer in each_worker(arguments.worker, _calls(arguments)[arguments.action]):
        if arguments.json:
            print(json.dumps({"worker": address, **answer}))
        else:
            fields = {name: value for name, value in answer.items() if value != ""}
            words = (one_line(value if name == "state" else f"{name} {value}") for name, value in fields.items())
            between = ("\n  ", "\n  ") if arguments.action == "info" else (" ", ", ")
            print(f"{address}:{between[0]}{between[1].join(words)}")
    return 0


def _calls(given: argparse.Namespace) -> dict[str, Callable[[worker_pb2_grpc.WorkerStub], Answer]]:
    """Each action's call of a worker, and how its answer is shown."""
    from sapwood.generation import role_name
    from sapwood.v1 import worker_pb2 as pb

    def load(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        stream = worker.WatchLoad(pb.WatchLoadRequest())
        report = next(iter(stream)).load
        stream.cancel()
        return _shown(report, _LOAD)

    def info(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        model = worker.GetModelInfo(pb.GetModelInfoRequest())
        defaults = {field.name: round(value, 6) for field, value in model.sampling_defaults.ListFields()}
        shown = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        return _shown(model, _INFO) | {"role": role_name(model.role), "sampling_defaults": shown or "none"}

    def sleep(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        answer = worker.Sleep(pb.SleepRequest(memory=_memory(given.memory)))
        return {"state": "asleep", "bytes": answer.bytes}

    def wake(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        answer = worker.WakeUp(pb.WakeUpRequest(memory=_memory(given.memory)))
        return {"state": "asleep" if answer.asleep else "awake"}

    def pin(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        request = pb.PinPrefixRequest(
            name=given.name, token_ids=given.token_ids, cache_salt=given.salt, ttl_seconds=given.seconds
        )
        return {"pinned_tokens": worker.PinPrefix(request).pinned_tokens}

    def experts(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        load = worker.GetExpertLoad(pb.GetExpertLoadRequest())
        tokens = list(load.tokens)
        if not tokens:
            return _done(load, "the model has no experts")
        found: Answer = {
            "experts": len(tokens),
            "tokens": sum(tokens),
            "balance": round(load.balance, 3),
            "busiest": tokens.index(max(tokens)),
            "busiest_share": round(max(tokens) / max(sum(tokens), 1), 3),
            "unused": tokens.count(0),
            **({"tiles": load.tiles, "tile_sizes": load.tile_sizes} if load.tiles else {}),
        }
        if load.ranks:
            found |= {"ranks": load.ranks, "rank_balance": round(load.rank_balance, 3), "moves": load.moves}
            found["exchanged_bytes"] = load.exchanged_bytes
        layers = [_by_rank(layer.experts, load.ranks) for layer in load.layers]
        return found | {"each": tokens, "layers": layers} if given.json else found

    return {
        "experts": experts,
        "info": info,
        "load": load,
        "sleep": sleep,
        "wake": wake,
        "pause": lambda worker: _done(worker.Pause(pb.PauseRequest(retract=given.retract)), "paused"),
        "resume": lambda worker: _done(worker.Resume(pb.ResumeRequest()), "resumed"),
        "drain": lambda worker: _done(worker.Drain(pb.DrainRequest()), "drained"),
        "role": lambda worker: _done(
            worker.SetRole(pb.SetRoleRequest(role=f"WORKER_ROLE_{given.role.upper()}")), f"role {given.role}"
        ),
        "flush": lambda worker: {"freed_pages": worker.FlushCache(pb.FlushCacheRequest()).freed_pages},
        "pin": pin,
        "unpin": lambda worker: {"found": worker.UnpinPrefix(pb.UnpinPrefixRequest(name=given.name)).found},
        "abort": lambda worker: {"found": worker.Abort(pb.AbortRequest(request_id=given.request_id)).found},
        "profile start": lambda worker: {
            "folder": worker.StartProfile(pb.StartProfileRequest(folder=given.folder)).folder
        },
        "profile stop": lambda worker: {"path": worker.StopProfile(pb.StopProfileRequest()).path},
    }


def _done(_: object, what: str) -> Answer:
    return {"state": what}


def _by_rank(experts: Sequence[int], ranks: int) -> list[list[int]]:
    """The experts that each rank has of a layer."""
    room = len(experts) // ranks
    return [[each for each in experts[rank * room : (rank + 1) * room] if each >= 0] for rank in range(ranks)]


def _shown(message: Message, names: Sequence[str]) -> Answer:
    return {name: getattr(message, name) for name in names}


def _memory(name: str) -> list[str]:
    """Which memory is meant, as the enum's names; empty: all."""
    return [] if name == "all" else [f"MEMORY_{name.replace('-', '_').upper()}"]


def _token_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
