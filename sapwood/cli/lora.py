"""`sapwood lora`: lists, loads and unloads the adapters (LoRA) of a router's workers."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES
from sapwood.cli.router import add_router_verb, router_stub
from sapwood.cli.top import table

if TYPE_CHECKING:  # grpc is loaded only by the verbs that use it
    from sapwood.v1 import router_pb2

_TIMEOUT = 10.0
_LOAD_TIMEOUT = 900.0


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "lora",
        help="list, load or unload adapters (LoRA)",
        description="Lists the adapters of a router's workers, has workers load one, or unloads one everywhere.",
        epilog=EXIT_CODES,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    shown = add_router_verb(actions, "list", "show the adapters and where they are", _list)
    shown.add_argument("--json", action="store_true", help="One JSON object an adapter and line. [default: a table]")
    load = add_router_verb(actions, "load", "load an adapter, in the place of one of its name", _load)
    load.add_argument("name", metavar="NAME", help="what requests call it")
    load.add_argument(
        "path",
        metavar="PATH",
        help="a folder in PEFT's format on the workers' machines, owner/name on the hub, or a URL that fsspec reads",
    )
    load.add_argument("--model", metavar="MODEL", help="The model that it changes, where there are several.")
    load.add_argument("--pin", action="store_true", help="Keep it in the workers' memory. [default: no]")
    unload = add_router_verb(actions, "unload", "unload an adapter from all workers", _unload)
    unload.add_argument("name", metavar="NAME", help="its name, or MODEL:NAME")
    unload.add_argument("--abort", action="store_true", help="End the requests that run with it. [default: no]")


def _list(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import router_pb2

    with router_stub(arguments) as router:
        loras = router.ListLoras(router_pb2.RouterListLorasRequest(), timeout=_TIMEOUT).loras
    if arguments.json:
        for each in loras:
            print(json.dumps(_fields(each)))
        return 0
    rows = [("ADAPTER", "MODEL", "REQUESTS", "A MINUTE", "LOADED ON", "PLACED ON", "DIGEST", "PATH")]
    for each in loras:
        rate, digest = f"{each.requests_per_minute:.1f}", each.digest.hex()[:12]
        places = (str(len(each.workers)), str(len(each.chosen)))
        rows.append((each.name, each.model, str(each.in_flight), rate, *places, digest, each.path))
    print("\n".join(table(rows)))
    return 0


def _load(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import router_pb2

    request = router_pb2.RouterLoadLoraRequest(
        name=arguments.name, path=arguments.path, model=arguments.model or "", pinned=arguments.pin
    )
    with router_stub(arguments) as router:
        lora = router.LoadLora(request, timeout=_LOAD_TIMEOUT).lora
    print(f"{lora.name} of {lora.model} is loaded on {', '.join(lora.workers)}: digest {lora.digest.hex()[:12]}")
    return 0


def _unload(arguments: argparse.Namespace) -> int:
    from sapwood.v1 import router_pb2

    request = router_pb2.RouterUnloadLoraRequest(name=arguments.name, abort_requests=arguments.abort)
    with router_stub(arguments) as router:
        running = router.UnloadLora(request, timeout=_LOAD_TIMEOUT).running_requests
    print(f"{arguments.name} is unloaded; {running} requests still run with it")
    return 0


def _fields(lora: router_pb2.FleetLora) -> dict[str, object]:
    return {
        "name": lora.name,
        "model": lora.model,
        "path": lora.path,
        "version": lora.version,
        "digest": lora.digest.hex(),
        "workers": list(lora.workers),
        "chosen": list(lora.chosen),
        "in_flight": lora.in_flight,
        "requests_per_minute": lora.requests_per_minute,
    }
