"""A worker on a CPU needs the packages of ``sapwood[worker]``, and none of those that come with a GPU or for one feature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "flashinfer", "transformers", "xgrammar", "nixl", "mooncake", "opentelemetry"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Missing())
from pathlib import Path
import sapwood_worker.app
import sapwood_worker.core.scheduler_process
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions
build_runner(RunnerOptions(model_path=Path(sys.argv[1]), load_format="dummy", num_pages=64, max_running=2, threads=1))
print("built")
"""


def test_a_worker_on_a_cpu_starts_without_the_packages_of_a_gpu(dummy_model: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(dummy_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "built\n", done.stderr[-3000:]
