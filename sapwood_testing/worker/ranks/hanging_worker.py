"""A real worker whose ranks hang when they are told to: all flags of ``python -m sapwood_worker``, and ``--hang-folder``."""

from __future__ import annotations

import sys

import uvloop

from sapwood_common.settings.config import parse_config
from sapwood_common.telemetry.logs import setup_logging
from sapwood_testing.worker.ranks.hanging_model import HangingWorkerConfig
from sapwood_worker.app import serve


def main() -> int:
    """Entry point."""
    config = parse_config(HangingWorkerConfig, "hanging_worker", "A worker whose ranks hang, for tests.")
    setup_logging("hanging-worker", config.log_level, config.log_format)
    return uvloop.run(serve(config, "sapwood_testing.worker.ranks.hanging_model:make_runner"))


if __name__ == "__main__":
    sys.exit(main())
