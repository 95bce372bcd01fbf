"""A folder of Unix sockets. Its process removes it; if that was killed, the next one that makes such a folder does.

A living process holds a lock (flock) on its folder, which the kernel releases when the process dies. The lock is taken before
the folder gets the name under which others look for it, so that no starting process's folder looks abandoned.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


class SocketFolder:
    """A new folder that only this user may enter. Removes those of the same prefix that killed processes of this user have left.

    Args:
        prefix: Begins its name.
        root: Where the folders are; None is the system's place for temporary files.

    Attributes:
        path: The folder.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        root = Path(tempfile.gettempdir()) if root is None else root
        for left in root.glob(f"{prefix}*"):
            _remove_if_dead(left)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        unnamed = self.path / "unlocked"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Removes it. May be called again. Never fails."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_if_dead(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is about to be locked, or has just been removed
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
