"""Files with secrets, which other users of the machine must not read, or of keys, which they must not change."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def others_may_read(file: int | Path) -> bool:
    """Whether other users may read or change a file, given by its path or descriptor.

    A group may where the file belongs to somebody else: so Kubernetes gives secrets to processes, by ``fsGroup``.

    Raises:
        OSError: There is no such file.
    """
    found = os.fstat(file) if isinstance(file, int) else file.stat()
    ours = found.st_uid == os.geteuid()
    return bool(found.st_mode & (stat.S_IRWXO | (stat.S_IRWXG if ours else stat.S_IWGRP)))


def warn_of_readers(path: Path, flag: str) -> None:
    """Logs a warning if other users may read the secret in a file that another program made. Never fails."""
    try:
        if others_may_read(path):
            logger.warning(
                "%s: other users may read or change %s, which holds a secret: chmod 600 %s", flag, path, path
            )
    except OSError:
        pass  # who reads it says so


def warn_of_writers(path: Path, flag: str) -> None:
    """Logs a warning if all other users may change a file that says who may do what. Never fails."""
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            logger.warning("%s: other users may change %s: chmod o-w %s", flag, path, path)
    except OSError:
        pass  # who reads it says so
