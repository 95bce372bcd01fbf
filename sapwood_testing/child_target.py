"""A process of a ``ChildPool`` that answers in every bad way. Not for use outside of tests."""

from __future__ import annotations

import os
import sys
import time

from sapwood_common.child_pool import Answer, serve_parent


def make(settings: bytes) -> tuple[bytes, Answer]:
    """Greets with the settings."""
    return b"hello " + settings, _answer


def _answer(question: bytes) -> bytes:
    word, _, rest = question.partition(b" ")
    match word:
        case b"echo":
            return rest
        case b"pid":
            return str(os.getpid()).encode()
        case b"parent":
            return str(os.getppid()).encode()
        case b"exit":
            os._exit(3)
        case b"memory":
            return bytes(1 << 30)
        case b"sleep":
            time.sleep(1000)
        case b"cpu" | b"spin":
            while True:
                pass
        case b"work":
            until = time.thread_time() + float(rest)
            while time.thread_time() < until:
                pass
    return b"done"


if __name__ == "__main__":
    sys.exit(serve_parent(make))
