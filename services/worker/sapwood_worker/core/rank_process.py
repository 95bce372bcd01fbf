"""The process of a rank from 1 up: loads its part of the model and follows rank 0. ``supervisor.py`` starts it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from multiprocessing.connection import Connection

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import connect
from sapwood_common.telemetry.logs import setup_logging
from sapwood_worker.core.child import add_arguments, begin, load, spare_the_collector
from sapwood_worker.core.group.follower import follow
from sapwood_worker.ipc.liveness import Heartbeat, progress_file
from sapwood_worker.ipc.rank import exit_reason
from sapwood_worker.records.ranks import Place

logger = logging.getLogger(__name__)


def main() -> int:
    """Entry point; the exit code is 0 after an orderly end, 1 after an error, which is reported to the front."""
    parser = argparse.ArgumentParser(description="A rank of a worker; started by sapwood_worker.")
    add_arguments(parser)
    parser.add_argument("--rank", type=int, required=True, help="Its number, from 1.")
    parser.add_argument("--leader", required=True, help="The socket to rank 0: a file descriptor, or HOST:PORT.")
    parser.add_argument("--rendezvous", required=True, help="Where all ranks meet.")
    arguments = parser.parse_args()
    config, runner_name, key = begin(arguments)
    setup_logging(f"rank-{arguments.rank}", config.log_level, config.log_format)
    heartbeat = Heartbeat(arguments.folder / progress_file(arguments.rank))
    place = Place(arguments.rank, config.ranks, arguments.rendezvous, config.nnodes, waits=heartbeat.waits)
    leader: Connection | None = None
    try:
        way = arguments.leader
        leader = Connection(int(way)) if way.isdecimal() else connect(way, key, place.rank)
        runner = load(runner_name)(config, place)
        spare_the_collector()
        follow(runner, leader, place.waits)
    except Exception as error:
        if not isinstance(error, ConfigError):
            logger.exception("%s failed", place)
        reason = str(error) or type(error).__name__
        exit_reason(arguments.folder, place.rank).write_text(reason)
        if leader is not None:
            with contextlib.suppress(OSError):  # which is for a leader that waits for this rank's model
                leader.send_bytes(reason.encode())
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # it has nothing to put away, and NCCL would wait for graphs and for the other ranks
