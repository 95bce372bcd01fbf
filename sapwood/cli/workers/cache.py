"""`sapwood cache`: shows, empties and rearranges the tiers of workers' KV caches."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES
from sapwood.cli.terminal import one_line
from sapwood.cli.workers.each_worker import add_worker_option, each_worker
from sapwood_common.settings.flags import one_of

if TYPE_CHECKING:  # at run time grpc is loaded only by the verbs that use it
    from sapwood.v1 import worker_pb2, worker_pb2_grpc

_TIERS = {"device": 1, "host": 2, "storage": 3}
_NAMES = {number: name for name, number in _TIERS.items()}

Call = Callable[["worker_pb2_grpc.WorkerStub"], Iterable["worker_pb2.CacheTierStats"]]


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "cache",
        help="show or change workers' KV caches",
        description="Shows the tiers of workers' KV caches (device, host, storage) or changes them.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    stats = actions.add_parser("stats", help="show hits, bytes and bandwidth of each tier", allow_abbrev=False)
    clear = actions.add_parser("clear", help="empty tiers of what no running request holds", allow_abbrev=False)
    clear.add_argument(
        "--tier",
        action="append",
        default=[],
        type=one_of(*_TIERS),
        help="device, host or storage; repeatable. A store loses only what this model has put there. [default: all]",
    )
    attach = actions.add_parser("attach", help="attach a store as the third tier", allow_abbrev=False)
    attach.add_argument("url", metavar="URL", help="as a worker's --storage takes it")
    detach = actions.add_parser("detach", help="detach the store", allow_abbrev=False)
    for name, action in (("stats", stats), ("clear", clear), ("attach", attach), ("detach", detach)):
        add_worker_option(action)
        action.add_argument("--json", action="store_true", help="One JSON object a tier and line. [default: a table]")
        action.set_defaults(run=run, action=name)


def run(arguments: argparse.Namespace) -> int:
    """Makes the call to every worker and shows the tiers that come back; returns the exit code, raises CliError."""
    call = _calls(arguments)[arguments.action]
    for address, tiers in each_worker(arguments.worker, lambda worker: list(call(worker))):
        if arguments.json:
            for tier in tiers:
                print(json.dumps({"worker": address, **_fields(tier)}))
        else:
            _print_table(address, tiers)
    return 0


def _calls(given: argparse.Namespace) -> dict[str, Call]:
    """What each action asks a worker."""
    from sapwood.v1 import worker_pb2 as pb

    def clear(worker: worker_pb2_grpc.WorkerStub) -> Iterable[worker_pb2.CacheTierStats]:
        tiers = [pb.CacheTier.Name(_TIERS[tier]) for tier in given.tier]
        return worker.ClearCache(pb.ClearCacheRequest(tiers=tiers)).tiers

    return {
        "stats": lambda worker: worker.GetCacheStats(pb.GetCacheStatsRequest()).tiers,
        "clear": clear,
        "attach": lambda worker: worker.AttachStorage(pb.AttachStorageRequest(url=given.url)).tiers,
        "detach": lambda worker: worker.DetachStorage(pb.DetachStorageRequest()).tiers,
    }


def _fields(tier: worker_pb2.CacheTierStats) -> dict[str, object]:
    fields: dict[str, object] = {field.name: getattr(tier, field.name) for field in tier.DESCRIPTOR.fields}
    return fields | {"tier": _NAMES[tier.tier]}


def _print_table(address: str, tiers: list[worker_pb2.CacheTierStats]) -> None:
    print(f"{address}")
    print(f"  {'tier':<8} {'pages':>17} {'hit tokens':>12} {'written':>22} {'read':>22} {'failures':>9}")
    for tier in tiers:
        pages = f"{tier.pages} of {tier.capacity}" if tier.capacity else "-"
        written, read = _traffic(tier.bytes_in, tier.seconds_in), _traffic(tier.bytes_out, tier.seconds_out)
        failures = tier.failures + tier.rejected_pages
        print(f"  {_NAMES[tier.tier]:<8} {pages:>17} {tier.hit_tokens:>12} {written:>22} {read:>22} {failures:>9}")
        if tier.url:
            print(
                f"  {'':<8} {one_line(f'{tier.url}: {tier.state}')}{f' ({one_line(tier.error)})' if tier.error else ''}"
            )


def _traffic(count: int, seconds: float) -> str:
    if not count:
        return "-"
    return f"{_scaled(count)}, {_scaled(count / seconds)}/s" if seconds else _scaled(count)


def _scaled(count: float) -> str:
    """Bytes as people read them: 23.7 kB."""
    power = min(3, max(0, int(math.log10(max(count, 1)) // 3)))
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB')[power]}"
