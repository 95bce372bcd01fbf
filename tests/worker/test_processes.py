"""What each of the worker's two processes imports."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("sapwood_worker.core.scheduler_process", ("grpc", "google.protobuf", "sapwood.v1")),
        ("sapwood_worker.__main__, sapwood_worker.front.service, sapwood_testing.worker.fake_worker", ("torch",)),
        ("sapwood_testing.worker.fake_model, sapwood_worker.core.scheduler_process", ("torch",)),
        ("sapwood_worker.model.runner.factory", ("grpc",)),
    ],
)
def test_a_process_does_not_import_what_is_the_others_business(modules: str, unwanted: tuple[str, ...]) -> None:
    program = f"import sys, {modules}; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
