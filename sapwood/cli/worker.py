"""`sapwood worker`: pauses, drains, flushes and profiles workers, pins prefixes, shows the model and the load."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sapwood.cli.each_worker import add_worker_option, each_worker
from sapwood.cli.errors import EXIT_CODES

if TYPE_CHECKING:  # at run time grpc is loaded only by the verbs that use it
    from sapwood.v1 import worker_pb2_grpc

Answer = dict[str, object]
Call = Callable[["worker_pb2_grpc.WorkerStub"], Answer]


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "worker",
        help="pause, drain, flush or profile workers",
        description="Operates workers. Each answer is one line, beginning with the worker's address.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")

    def action(name: str, text: str, run: Callable[[argparse.Namespace], int], *, to: Any = actions) -> Any:
        made = to.add_parser(name, help=text, allow_abbrev=False)
        add_worker_option(made)
        made.add_argument("--json", action="store_true", help="One JSON object a worker. [default: words]")
        made.set_defaults(run=run)
        return made

    action("info", "show the model, its cache, and what computes its attention and why", _info)
    action("load", "show what runs, what waits and how full the cache is", _load)
    pause = action("pause", "compute nothing until resume; requests may still come", _pause)
    pause.add_argument("--retract", action="store_true", help="also take the running requests' pages [default: no]")
    action("resume", "go on after a pause", _resume)
    action("drain", "refuse new requests and wait for those that run", _drain)
    action("flush", "forget every prefix that no request and no pin holds, in memory of device and host", _flush)
    pin = action("pin", "keep what is cached of a prefix", _pin)
    pin.add_argument("name", metavar="NAME", help="what to call it; a pin of this name is replaced")
    pin.add_argument("--token-ids", required=True, type=_token_ids, metavar="IDS", help="the prefix: 2,818,5279")
    pin.add_argument("--salt", default="", help="the cache salt of the requests that are to find it [default: none]")
    pin.add_argument("--seconds", type=int, help="for how long [default: until it is unpinned]")
    action("unpin", "let go of a pinned prefix", _unpin).add_argument("name", metavar="NAME", help="the pin's name")
    action("abort", "end a running request", _abort).add_argument("request_id", metavar="ID", help="the request's id")
    profile = actions.add_parser("profile", help="record a Chrome trace of what a worker computes", allow_abbrev=False)
    profiles = profile.add_subparsers(metavar="ACTION", required=True, title="actions")
    start = action("start", "begin to record", _start_profile, to=profiles)
    start.add_argument("--folder", default="", help="on the worker's machine [default: a new temporary one]")
    action("stop", "end the recording and show where it is", _stop_profile, to=profiles)


def _load(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    def call(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        stream = worker.WatchLoad(worker_pb2.WatchLoadRequest())
        load = next(iter(stream)).load
        stream.cancel()
        names = (
            *("running_requests", "running_tokens", "waiting_requests", "queued_tokens"),
            *("used_pages", "evictable_pages", "num_pages"),
        )
        return {name: getattr(load, name) for name in names}

    return _on_each(arguments, call)


def _info(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    def call(worker: worker_pb2_grpc.WorkerStub) -> Answer:
        info = worker.GetModelInfo(worker_pb2.GetModelInfoRequest())
        names = (
            *("model", "architecture", "dtype", "context_length", "max_running", "page_size", "num_pages"),
            *("prefill_attention", "decode_attention", "attention_reason"),
        )
        return {name: getattr(info, name) for name in names}

    return _on_each(arguments, call)


def _pause(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    request = worker_pb2.PauseRequest(retract=arguments.retract)
    return _on_each(arguments, lambda worker: _done(worker.Pause(request), "paused"))


def _resume(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    return _on_each(arguments, lambda worker: _done(worker.Resume(worker_pb2.ResumeRequest()), "resumed"))


def _drain(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    return _on_each(arguments, lambda worker: _done(worker.Drain(worker_pb2.DrainRequest()), "drained"))


def _flush(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    request = worker_pb2.FlushCacheRequest()
    return _on_each(arguments, lambda worker: {"freed_pages": worker.FlushCache(request).freed_pages})


def _pin(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    request = worker_pb2.PinPrefixRequest(
        name=arguments.name,
        token_ids=arguments.token_ids,
        cache_salt=arguments.salt,
        ttl_seconds=arguments.seconds,
    )
    return _on_each(arguments, lambda worker: {"pinned_tokens": worker.PinPrefix(request).pinned_tokens})


def _unpin(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    request = worker_pb2.UnpinPrefixRequest(name=arguments.name)
    return _on_each(arguments, lambda worker: {"found": worker.UnpinPrefix(request).found})


def _abort(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    request = worker_pb2.AbortRequest(request_id=arguments.request_id)
    return _on_each(arguments, lambda worker: {"found": worker.Abort(request).found})


def _start_profile(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    request = worker_pb2.StartProfileRequest(folder=arguments.folder)
    return _on_each(arguments, lambda worker: {"folder": worker.StartProfile(request).folder})


def _stop_profile(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import worker_pb2

    return _on_each(arguments, lambda worker: {"path": worker.StopProfile(worker_pb2.StopProfileRequest()).path})


def _done(_: object, what: str) -> Answer:
    return {"state": what}


def _on_each(arguments: argparse.Namespace, call: Call) -> int:
    """Makes the call to every worker and shows what comes back; returns the exit code, raises CliError."""
    for address, answer in each_worker(arguments.worker, call):
        if arguments.json:
            print(json.dumps({"worker": address, **answer}))
        else:
            words = ", ".join(str(value) if name == "state" else f"{name} {value}" for name, value in answer.items())
            print(f"{address}: {words}")
    return 0


def _token_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
