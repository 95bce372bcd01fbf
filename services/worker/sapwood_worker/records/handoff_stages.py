"""When a hand-over comes to its stages: one debug line for each, in whichever process and thread it happens.

``benchmarks/gpu/bench_handoff.py`` puts the lines of both workers together. The clock is the machine's monotonic one, so that
those of one host can be compared.
"""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


def reached(stage: str) -> None:
    """Says that a stage is reached now, if anybody wants to know. For any thread."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("handoff stage %s at %.6f", stage, time.monotonic())
