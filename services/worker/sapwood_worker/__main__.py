"""``python -m sapwood_worker``: starts one worker."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # ``python -m`` puts the current folder there: its numpy.py would be imported


import uvloop

from sapwood_common.settings.config import parse_config
from sapwood_common.telemetry.logs import setup_logging
from sapwood_worker.app import serve
from sapwood_worker.config import WorkerConfig


def main() -> int:
    """Entry point; the exit code is 1 if the worker could not start or lost its scheduler, 2 for a wrong flag."""
    config = parse_config(WorkerConfig, "sapwood_worker", "Serves a model: scheduler, KV cache and runner behind gRPC.")
    setup_logging("worker", config.log_level, config.log_format)
    return uvloop.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
