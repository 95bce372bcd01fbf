"""`sapwood store`: shows and deletes what routers keep of a tenant."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.errors import EXIT_CODES, FAILED, REFUSED, CliError

if TYPE_CHECKING:  # loaded only by the verbs that use it
    from sapwood_router.store.records import Store


def configure(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "store",
        help="show or delete what routers keep of a tenant",
        description="Shows or deletes what a router's --store keeps of a tenant: responses, conversations, files and batches.",
        epilog=EXIT_CODES,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    for name, what, run in (
        ("show", "show how much is kept of a tenant", _show),
        ("forget", "delete all that is kept of a tenant", _forget),
    ):
        action = actions.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]}.")
        action.add_argument(
            "url", metavar="STORE", help="the router's --store: sqlite:PATH, postgresql://... or redis://..."
        )
        action.add_argument("tenant", metavar="TENANT", help="the name of its API key; '' where there are no tenants")
        action.set_defaults(run=run)


def _show(arguments: argparse.Namespace) -> int:
    from sapwood_router.store.records import FILES, KEPT, SESSIONS

    async def run(store: Store) -> None:
        named = ((KEPT, "responses and conversations"), (FILES, "files and batches"), (SESSIONS, "sessions"))
        for group, what in named:
            count, size = await store.total(arguments.tenant, group)
            print(f"{what}: {count}, {size} bytes")

    return _with_store(arguments, run)


def _forget(arguments: argparse.Namespace) -> int:
    async def run(store: Store) -> None:
        print(f"{await store.forget(arguments.tenant)} records deleted")

    return _with_store(arguments, run)


def _with_store(arguments: argparse.Namespace, run: Callable[[Store], Awaitable[None]]) -> int:
    try:
        from sapwood_common.errors import SapwoodError
        from sapwood_net.errors import ConfigError
        from sapwood_router.store.opening import open_store
        from sapwood_router.store.records import Retention
    except ImportError as missing:
        raise CliError(f"it needs the router's packages: pip install 'sapwood[router]' ({missing})", REFUSED) from None
    url: str = arguments.url.partition(",")[0]
    if url in ("memory", "sqlite", "sqlite:"):
        raise CliError("STORE names the file or database itself: sqlite:PATH, postgresql://... or redis://...", REFUSED)
    if url.startswith("sqlite:") and not Path(url.removeprefix("sqlite:")).is_file():
        raise CliError(f"there is no file {url.removeprefix('sqlite:')}", REFUSED)

    async def opened() -> None:
        store = open_store(url, 0, Retention(0, 0))
        try:
            await run(store)
        finally:
            await store.close()

    try:
        asyncio.run(opened())
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from error
    except SapwoodError as error:
        raise CliError(error.message, FAILED) from error
    return 0
