"""``python -m sapwood_router`` starts the router."""

from __future__ import annotations

import gc
import sys

import uvloop

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import parse_config
from sapwood_common.telemetry.logs import setup_logging
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig

_COLLECT_AFTER = (8_000, 3, 250)
"""Objects after which the youngest are looked through; collections of a generation after which the next is. Where a flood leaves
thousands of calls open, each collection but the last's takes some milliseconds."""


async def _serve(config: RouterConfig) -> None:
    application = RouterApplication(config)
    try:
        await application.start()
    except ConfigError:
        await application.stop()
        raise
    _spare_the_collector()
    await application.serve()


def _spare_the_collector() -> None:
    """A request makes hundreds of containers and hardly a cycle: at the usual threshold the collector, which looks at all that
    lives, took an eighth of the router's CPU time. What is there at the start stays and is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def main() -> None:
    """Runs the router until it is told to stop; exits 2 if it cannot start as configured."""
    config = parse_config(RouterConfig, "sapwood_router", "Routes requests to workers: gRPC and the OpenAI API.")
    setup_logging("router", config.log_level, config.log_format)
    try:
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"sapwood_router: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
