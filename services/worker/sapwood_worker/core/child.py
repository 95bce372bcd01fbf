"""Start-up and failure handling of the worker's child processes."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.rank import RankTask

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_COLLECT_AFTER = (700, 10, 250)
"""Objects after which the youngest are looked through; collections of a generation after which the next is. A collection of the
last took 20 ms with 18 000 pages cached, and was due after some thirty prompts of 8192 tokens."""


_SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN and of torch's layer over it: each keeps compiled products by their shape, 1024 of them unless these say otherwise.
They are read when the first product is computed."""
_SHAPES = 128
"""With 1024, steps of ever other numbers of tokens took 800 MB (benchmarks/soak.py); with 128 they take 180 MB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the front tells each of them (``ipc/supervisor.py``)."""
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)


class Task(NamedTuple):
    """The task that the front gives to a process.

    Attributes:
        config: The worker's configuration.
        runner: ``module:function`` that makes its runner.
        key: What ranks of other hosts say first when they connect to rank 0; empty: there are none.
    """

    config: WorkerConfig
    runner: str
    key: bytes


def begin(arguments: argparse.Namespace) -> Task:
    """Ties the process's life to the front's, which alone is stopped by signals; reads the task from standard input."""
    if sys.platform == "linux":  # elsewhere an idle process notices the front's end by itself
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments.parent:  # the front died before the call
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in _SHAPE_CACHES:
        os.environ.setdefault(name, str(_SHAPES))
    faulthandler.register(signal.SIGUSR2)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=RankTask)
    config_class: type[WorkerConfig] = load(task.config_class)
    return Task(config_class.model_validate_json(task.config), task.runner, task.key)


def load(name: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return vars(importlib.import_module(module))[attribute]


def spare_the_collector() -> None:
    """Called once the model is loaded: Python's collector never looks again at the objects that live by then, hundreds of
    thousands with torch and the kernels' compilers. Later ones that live long it looks at seldom: every cached page leaves
    some. Decoding would stop meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
