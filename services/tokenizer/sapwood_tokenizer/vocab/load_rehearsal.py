"""Loads the part of a ``tokenizer.json`` that runs expressions, in a process that can be ended.

The library runs the normalizer over added tokens while it loads a file. A normalizer may replace by any expression, whose time
and memory a stranger chose: so such a file is tried first, without its vocabulary, with limits:
``python -P -m sapwood_tokenizer.vocab.load_rehearsal FILE SECONDS BYTES``.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from sapwood_common.python_process import python_command, python_environment
from sapwood_tokenizer.vocab.special_tokens import VocabularyError

SECONDS = 20.0
_MEMORY_BYTES = 2 << 30
_OF_THE_FILE = 12
"""Times the file's size that parsing it may need."""
_NORMALIZED = re.compile(rb'"normalized"\s*:\s*true')
_ESCAPED = re.compile(rb"\\u00[2-7]")
"""An ASCII character as no writer of such files writes it: keys may be hidden so."""
_PANIC = "PanicException"
_MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


def rehearse(file: Path, seconds: float = SECONDS) -> None:
    """Tries whether a file can be loaded in bounded time and memory, if there is reason to.

    Raises:
        VocabularyError: It cannot.
        OSError: It cannot be read.
    """
    content = file.read_bytes()
    if not ((b"Replace" in content and _NORMALIZED.search(content)) or _ESCAPED.search(content)):
        return
    most = _MEMORY_BYTES + _OF_THE_FILE * len(content)
    del content
    arguments = ("-m", __name__, str(file.absolute()), str(seconds), str(most))
    try:
        ran = subprocess.run(
            python_command(*arguments),
            env=python_environment({"RUST_BACKTRACE": "0"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=3 * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        ran = None
    if ran is None or ran.returncode:
        raise VocabularyError(
            f"its normalizer needs more than {seconds:g} s or {most >> 20} MiB for the file's own added tokens, or fails on them"
        )


def is_panic(error: BaseException) -> bool:
    """Whether the library gave up in a way that is no Exception."""
    return type(error).__name__ == _PANIC


def main(path: str, seconds: str, most: str) -> int:
    """Runs in the process; returns 0 unless loading is to be refused."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (int(most), int(most)))
    limit = int(float(seconds)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    with contextlib.suppress(ValueError, RecursionError):  # the service says what is wrong with it
        found = json.loads(Path(path).read_bytes())
        if isinstance(found, dict):
            kept = {name: found.get(name) for name in ("normalizer", "added_tokens")}
            try:
                Tokenizer.from_str(json.dumps({"version": "1.0", **kept, "model": _MODEL}))
            except Exception:  # likewise
                return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
