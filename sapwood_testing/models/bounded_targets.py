"""What the tests call in bounded processes: ``sleep``, ``memory``, ``print``, ``exit``, or any other text, which is answered."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def start(settings: bytes) -> Callable[[bytes], bytes]:
    """Answers with the settings, the process's id and the question."""

    def answer(question: bytes) -> bytes:
        match question:
            case b"sleep":
                time.sleep(600)
            case b"memory":
                try:
                    bytearray(1 << 34)
                except MemoryError:
                    os._exit(9)
            case b"print":
                print("a library says something", flush=True)
                os.write(1, b"and its C code too\n")
            case b"exit":
                os._exit(1)
        return b" ".join((settings, str(os.getpid()).encode(), question))

    return answer
