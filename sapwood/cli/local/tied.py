"""Starts a service so that it does not outlive the process that started it: ``-m sapwood.cli.local.tied MODULE ARGUMENT...``

On Linux it asks the kernel to send SIGTERM when the parent dies, however it dies; the request survives exec. This runs in a
process of its own because the alternative, ``preexec_fn``, forks the parent with its threads. On other systems services are
stopped only by a living parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from sapwood_common.python_process import python_command

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Ties this process to its parent, then becomes ``python -m MODULE ARGUMENT...``."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the request
            sys.exit(1)
    os.execv(sys.executable, python_command("-m", *sys.argv[1:]))


if __name__ == "__main__":
    main()
