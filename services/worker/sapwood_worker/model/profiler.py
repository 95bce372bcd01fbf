"""Records what the scheduler process does, as a Chrome trace, with torch's profiler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch


class TorchProfiler:
    """Implements ``Profiler``: records operators on the CPU and kernels on the GPU. One recording at a time."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._folder = Path()

    def start(self, folder: str) -> None:
        """Begins to record.

        Raises:
            OSError: The folder cannot be made.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> str:
        """Writes ``trace-TIME.json``, for chrome://tracing or Perfetto, into the folder; returns its path."""
        self._profile.stop()
        path = self._folder / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1_000_000_000}.json"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        return str(path)
