"""`sapwood up --no-router`: one worker that answers HTTP on one port. What stands around it listens on Unix sockets only.

The HTTP front is the router's, with one worker that never changes and nothing to choose: the APIs, statuses and flags are the
same to the letter, and there is one edge to look after.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sapwood.cli.errors import REFUSED, CliError

FRONT = "http"
"""What the process that answers HTTP is called in logs."""
# On Unix sockets in a folder of one's own any number is free.
_FRONT, _TOKENIZER, _TOKENIZER_METRICS, _WORKER, _WORKER_METRICS = range(1, 6)


def settings_alone(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Settings of router, tokenizer and worker, by field.

    Args:
        arguments: Those of `sapwood up`.
        folder: For the sockets.

    Raises:
        CliError: A flag was given that means nothing here.
    """
    if arguments.workers not in (None, 1):
        raise CliError(f"--workers {arguments.workers}: with --no-router there is one worker", REFUSED)
    for flag in ("policy", "tokenizer_port", "worker_port"):
        if vars(arguments)[flag] is not None:
            raise CliError(f"--{flag.replace('_', '-')} has no effect with --no-router", REFUSED)
    if None not in (arguments.port, arguments.http_port) and arguments.port != arguments.http_port:
        raise CliError("--port and --http-port both mean the one port that --no-router leaves", REFUSED)
    port = arguments.http_port or arguments.port
    host = f"unix:{folder}/s"
    # The sockets are this user's alone, and whoever may open them may as well stop the processes.
    metrics = [f"{host}:{_TOKENIZER_METRICS}", f"{host}:{_WORKER_METRICS}"]
    return {
        "router": {
            "host": host,
            "port": _FRONT,
            "http_host": arguments.host or "127.0.0.1",
            "http_port": 0 if port is None and arguments.ports == "auto" else port,
            "policy": "round_robin",
            "metrics_of": metrics,
        },
        "tokenizer": {"host": host, "port": _TOKENIZER, "metrics_port": _TOKENIZER_METRICS},
        "worker": {"host": host, "port": _WORKER, "metrics_port": _WORKER_METRICS},
    }
