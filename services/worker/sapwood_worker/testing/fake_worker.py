"""A whole worker, gRPC front, ZeroMQ and scheduler process, around a :class:`FakeRunner`: no torch, no model.

``python -m sapwood_worker.testing.fake_worker --port 0 --step-ms 5`` takes every flag of ``python -m sapwood_worker`` and the
fake's own; see ``--help``. Its tokens are those of :func:`sapwood_worker.scheduler.fake_runner.continuation`.
"""

from __future__ import annotations

import sys

import uvloop

from sapwood_common.config import parse_config
from sapwood_common.telemetry import setup_logging
from sapwood_worker.application import serve
from sapwood_worker.testing.fake_model import FakeWorkerConfig


def main() -> int:
    """Entry point."""
    config = parse_config(FakeWorkerConfig, "fake_worker", "A worker without a model, for tests.")
    setup_logging("fake-worker", config.log_level, config.log_format)
    return uvloop.run(serve(config, "sapwood_worker.testing.fake_model:make_runner"))


if __name__ == "__main__":
    sys.exit(main())
