"""``python -m sapwood_router`` starts the router."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # ``python -m`` puts the current folder there: its numpy.py would be imported

import asyncio

import uvloop

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import parse_config
from sapwood_common.telemetry.logs import setup_logging
from sapwood_net.pacing.collector import Collector
from sapwood_router.app import RouterApplication
from sapwood_router.config import RouterConfig


async def _serve(config: RouterConfig) -> None:
    application = RouterApplication(config)
    try:
        await application.start()
    except ConfigError:
        await application.stop()
        raise
    collecting = asyncio.create_task(Collector().run(), name="garbage collector")
    try:
        await application.serve()
    finally:
        collecting.cancel()


def main() -> None:
    """Runs the router until it is stopped; exits 2 if it cannot start as configured."""
    config = parse_config(RouterConfig, "sapwood_router", "Routes requests to workers: gRPC and the OpenAI API.")
    setup_logging("router", config.log_level, config.log_format)
    try:
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"sapwood_router: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
