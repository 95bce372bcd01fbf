"""Python processes that import nothing from the folder in which they are started.

``python -m`` and ``python -c`` put the current folder before all others on the module path, so that a ``numpy.py`` in a folder
that somebody downloaded would be run. Every Python process that Sapwood starts is started with this module's command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def python_command(*arguments: str) -> list[str]:
    """The command line of a Python process with these arguments.

    Processes that it starts by ``multiprocessing`` inherit ``-P``.
    """
    return [sys.executable, "-P", *arguments]


def python_environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, by which processes of libraries import nothing from the current folder either.

    Args:
        further: Variables that replace those of this process.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1", **(further or {})}
