"""A whole worker, gRPC front, ZeroMQ and scheduler process, around a :class:`FakeRunner`: no torch, no model.

``python -m sapwood_testing.worker.fake_worker --port 0 --step-ms 5`` takes every flag of ``python -m sapwood_worker`` and the
fake's own; see ``--help``. Its tokens are those of :func:`sapwood_testing.worker.fake_runner.continuation`.
"""

from __future__ import annotations

import sys

import uvloop

from sapwood_common.settings.config import parse_config
from sapwood_common.telemetry.logs import setup_logging
from sapwood_testing.worker.fake_model import FakeWorkerConfig
from sapwood_worker.app import serve


def main() -> int:
    """Entry point."""
    config = parse_config(FakeWorkerConfig, "fake_worker", "A worker without a model, for tests.")
    setup_logging("fake-worker", config.log_level, config.log_format)
    return uvloop.run(serve(config, "sapwood_testing.worker.fake_model:make_runner"))


if __name__ == "__main__":
    sys.exit(main())
