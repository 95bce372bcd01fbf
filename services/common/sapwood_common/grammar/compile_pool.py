"""Compiles grammars in processes that may be killed while they do, in fair places (``child_pool``).

A caller is a source's salt: one tenant's long compilations delay another's short one by about one slice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sapwood_common.child_pool import ChildDiedError, ChildPool, PoolLimits, Progress
from sapwood_common.errors import InvalidArgumentError
from sapwood_common.grammar.source import GrammarSource

_MEMORY_BYTES = 1 << 30


class CompilePool:
    """Compiles sources in at most ``size`` processes, started when first needed. Lives on one event loop.

    Args:
        special_names: Names of the vocabulary's special tokens.
        size: Most compilations that run at a time.
        max_queued: Most that wait; more are refused.
    """

    def __init__(self, special_names: Sequence[str], size: int = 2, max_queued: int = 256) -> None:
        self._pool = ChildPool(
            "sapwood_common.grammar.compile_process",
            json.dumps(list(special_names)).encode(),
            PoolLimits(size=size, max_queued=max_queued, memory_bytes=_MEMORY_BYTES),
            "too many grammars wait to be compiled",
        )

    async def compile(self, source: GrammarSource, progress: Progress | None = None) -> tuple[str, list[str]]:
        """The compiled text, and what was left out of its lenient schemas. Cancelling the call kills the compilation.

        Args:
            source: What to compile.
            progress: Filled in meanwhile.

        Raises:
            InvalidArgumentError: The grammar is at fault; ``field`` is ``grammar.<kind>``, or the field of the part at fault.
            ResourceExhaustedError: Too many wait already.
        """
        field = f"grammar.{source.kind}"
        question = {
            "kind": source.kind,
            "text": source.text,
            "any_whitespace": source.options.any_whitespace,
            "lenient": source.options.lenient,
        }
        try:
            answer = json.loads(await self._pool.ask(json.dumps(question).encode(), source.salt, progress=progress))
        except ChildDiedError:
            raise InvalidArgumentError("the grammar needs too much memory to compile", field=field) from None
        if "error" in answer:
            raise InvalidArgumentError(
                f"the grammar cannot be compiled: {answer['error']}", field=answer["field"] or field
            )
        return answer["lark"], answer["left_out"]

    async def close(self) -> None:
        """Ends all processes."""
        await self._pool.close()
