"""What a process of a worker sets for itself before it computes anything."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from sapwood_worker.config import WorkerConfig
from sapwood_worker.ipc.rank import RankTask

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
BEGINS = f"""
import argparse, os
from sapwood_worker.core.child import begin
begin(argparse.Namespace(parent=os.getppid(), folder=None))
print(*(os.environ[name] for name in {NAMES}))
"""


@pytest.mark.parametrize(("given", "kept"), [({}, "128 128"), ({NAMES[0]: "7"}, "7 128")])
def test_products_are_kept_of_few_shapes_unless_the_operator_says_otherwise(given: dict[str, str], kept: str) -> None:
    """Of 1024 shapes a scheduler's memory grew by 130 MB an hour."""
    task = RankTask("sapwood_worker.config:WorkerConfig", WorkerConfig().model_dump_json(), "module:function")
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", BEGINS]
    ended = subprocess.run(
        command, input=msgspec.json.encode(task), stdout=subprocess.PIPE, env=others | given, check=True
    )
    assert ended.stdout.decode().strip() == kept
