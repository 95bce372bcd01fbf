"""The process that compiles: ``python -m sapwood_common.grammar.compile_process``. Started, fed and killed by ``compile_pool``.

Frames on standard input and output: 4 bytes length, big-endian, then JSON. The first frame in holds the settings; each later
one holds a source, and is answered by one frame with ``lark`` or ``error``. The process ends with its input or its parent.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from typing import Any, BinaryIO

from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource


def main() -> int:
    """Compiles until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which then closes the input
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    settings = _read(source)
    if settings is None:
        return 0
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"], settings["memory_bytes"]))
    builder = GrammarBuilder(settings["special_names"])
    while (request := _read(source)) is not None:
        options = GrammarOptions(request["any_whitespace"], request["lenient"])
        try:
            answer = {"lark": builder.compile(GrammarSource(request["kind"], request["text"], options))}
        except GrammarError as error:
            answer = {"error": str(error)}
        except (MemoryError, RecursionError):
            answer = {"error": "it is too large or nested too deep"}
        payload = json.dumps(answer).encode()
        sink.write(len(payload).to_bytes(4, "big") + payload)
        sink.flush()
    return 0


def _read(source: BinaryIO) -> dict[str, Any] | None:
    header = source.read(4)
    if len(header) < 4:
        return None
    frame: dict[str, Any] = json.loads(source.read(int.from_bytes(header, "big")))
    return frame


if __name__ == "__main__":
    sys.exit(main())
