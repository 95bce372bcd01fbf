"""Which GPUs each of several workers of this machine takes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from sapwood.cli.errors import REFUSED, CliError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASKING_SECONDS = 30.0


def gpus_here(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that processes with this environment may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    # By their unique names: CUDA may number them in another order.
    asked = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def share_gpus(workers: int, each: int, device: str) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each worker; empty: as it is here, where there are no GPUs or one worker, or fewer GPUs than
    workers of one rank, which then share them.

    Args:
        workers: Workers of this machine.
        each: Ranks of each on this machine.
        device: The workers' ``--device``.

    Raises:
        CliError: There are too few.
    """
    found: Sequence[str] = [] if workers == 1 or device == "cpu" else gpus_here(os.environ)
    if len(found) < workers * each:
        if found and each > 1:
            raise CliError(
                f"--workers {workers} of {each} ranks each need {workers * each} GPUs: there are {len(found)} here",
                REFUSED,
            )
        return ()
    return tuple(",".join(found[worker * each : (worker + 1) * each]) for worker in range(workers))
