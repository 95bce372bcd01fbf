"""The process that compiles: ``python -P -m sapwood_common.grammar.compile_process``, of a ``ChildPool``.

The settings are a JSON list: the names of the special tokens. A question is a JSON object: a source. Its answer is a JSON object
with ``lark`` and ``left_out``, or with ``error`` and ``field``.
"""

from __future__ import annotations

import json
import sys

from sapwood_common.child_pool import Answer, serve_parent
from sapwood_common.grammar.artefact import COMPILE_STACK_BYTES
from sapwood_common.grammar.compile import GrammarBuilder
from sapwood_common.grammar.json_schema import GrammarError
from sapwood_common.grammar.source import GrammarOptions, GrammarSource


def make(settings: bytes) -> tuple[bytes, Answer]:
    """The greeting, which is empty, and what compiles."""
    builder = GrammarBuilder(json.loads(settings))

    def answer(question: bytes) -> bytes:
        request = json.loads(question)
        options = GrammarOptions(request["any_whitespace"], request["lenient"])
        try:
            lark, left_out = builder.compile_noting(GrammarSource(request["kind"], request["text"], options))
            found: dict[str, object] = {"lark": lark, "left_out": left_out}
        except GrammarError as error:
            found = {"error": str(error), "field": error.field}
        except (MemoryError, RecursionError):
            found = {"error": "it is too large or nested too deep", "field": ""}
        return json.dumps(found).encode()

    return b"", answer


if __name__ == "__main__":
    sys.exit(serve_parent(make, COMPILE_STACK_BYTES))
