"""A worker in processes of its own that needs no model."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from pathlib import Path

POISON = 999


class FakeWorkerProcess:
    """A real worker, front and scheduler in their processes, around the runner that needs no model.

    ``log`` is what it has said so far, all of it after :meth:`wait`; what it says after it listens also goes to the test's own
    standard error, which pytest shows when the test fails. A prompt that begins with POISON makes its step fail.
    """

    def __init__(self, *flags: str, step_ms: float = 1) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sapwood_testing.worker.fake_worker"),
                *("--port", "0", "--step-ms", str(step_ms), "--poison-token", str(POISON), *flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if found := re.search(r"listening on ([\w.:]+)", line):
                self.address = found.group(1)
                self._reader = threading.Thread(target=self._pass_on, daemon=True)
                self._reader.start()
                return
        raise AssertionError(f"the worker did not start: {self.log}")

    def _pass_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            with contextlib.suppress(ValueError):  # pytest has closed it
                print(line, end="", file=sys.stderr)

    def rank_pids(self) -> list[int]:
        """The processes of its ranks, the scheduler's first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def scheduler_pid(self) -> int:
        [pid] = self.rank_pids()
        return pid

    def wait(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        return code
