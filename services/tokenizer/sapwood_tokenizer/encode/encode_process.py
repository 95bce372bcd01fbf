"""The process that encodes for tokenizers with unknown running time: ``python -P -m sapwood_tokenizer.encode.encode_process``, of
a ``ChildPool``.

The settings are a ``tokenizer.json``. The greeting is JSON: the tokens before and after a text, and the pair template; or
``error``. A question is JSON: texts, whether special tokens are parsed, whether offsets are wanted. An answer is ``+`` and JSON:
ids and offsets of each text, or ``-`` and the library's error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict

from tokenizers import Tokenizer

from sapwood_common.child_pool import Answer, ChildDiedError, ChildPool, PoolLimits, TimeUpError, serve_parent
from sapwood_common.errors import ConfigError, ResourceExhaustedError
from sapwood_tokenizer.encode.batch_encoder import Encoded, EncodeStoppedError, Library, LibraryHere
from sapwood_tokenizer.encode.pair_template import PairTemplate, read_pair_template

_SECONDS = 10.0
_CHARACTERS_A_SECOND = 20_000
"""How fast a text must be encoded at least, besides ``_SECONDS``."""
_MEMORY_BYTES = 1 << 30


class LibraryInProcesses(Library):
    """Encodes in processes that are ended when a text takes too long. Called on threads; made by :func:`start_library`.

    Args:
        pool: The processes.
        loop: The event loop that the pool lives on.
        greeting: What a process said of the tokenizer.

    Attributes:
        pair: How the tokenizer joins two texts.
    """

    elsewhere = True

    def __init__(self, pool: ChildPool, loop: asyncio.AbstractEventLoop, greeting: dict[str, object]) -> None:
        self._pool = pool
        self._loop = loop
        self.encoded = {"tokenizers": 0}
        before, after, pair = greeting["before"], greeting["after"], greeting["pair"]
        assert isinstance(before, list) and isinstance(after, list)
        self.around = array("I", before), array("I", after)
        self.pair = (
            PairTemplate(*(tuple(pair[name]) for name in ("before", "between", "after")))
            if isinstance(pair, dict)
            else None
        )

    def encode(self, texts: Sequence[str], caller: str, *, parse_special_tokens: bool, offsets: bool) -> list[Encoded]:
        """Raises EncodeStoppedError where a text takes too much time or memory, RuntimeError where the library fails."""
        self.encoded["tokenizers"] += len(texts)
        question = json.dumps([list(texts), parse_special_tokens, offsets]).encode()
        allowed = _SECONDS + sum(map(len, texts)) / _CHARACTERS_A_SECOND
        asked = asyncio.run_coroutine_threadsafe(self._pool.ask(question, caller, allowed), self._loop)
        try:
            answer = asked.result()
        except TimeUpError:
            raise EncodeStoppedError(f"it did not end within {allowed:.3g} s") from None
        except ChildDiedError:
            raise EncodeStoppedError("it needs too much memory") from None
        except ResourceExhaustedError as error:
            raise EncodeStoppedError(error.message) from None
        if not answer.startswith(b"+"):
            raise RuntimeError(answer[1:].decode())
        return [Encoded(array("I", ids), places) for ids, places in json.loads(answer[1:])]

    async def close(self) -> None:
        """Ends the processes."""
        await self._pool.close()


async def start_library(tokenizer: Tokenizer, origin: str) -> LibraryInProcesses:
    """Starts a process with the tokenizer.

    Raises:
        ConfigError: The tokenizer cannot be used, or takes a minute or all memory for one letter; the message has its origin.
    """
    limits = PoolLimits(size=2, most_paused=4, max_queued=4096, slice_seconds=0.05, memory_bytes=_MEMORY_BYTES)
    pool = ChildPool(
        "sapwood_tokenizer.encode.encode_process",
        tokenizer.to_str().encode(),
        limits,
        "too many texts take long to encode",
    )
    try:
        greeting = json.loads(await pool.start())
        if "error" in greeting:
            raise ConfigError(f"{origin}: {greeting['error']}")
    except (ChildDiedError, TimeoutError):
        await pool.close()
        raise ConfigError(f"{origin}: the tokenizer takes a minute, or all memory, for one letter") from None
    except BaseException:
        await pool.close()
        raise
    return LibraryInProcesses(pool, asyncio.get_running_loop(), greeting)


def make(settings: bytes) -> tuple[bytes, Answer]:
    """Loads the tokenizer."""
    tokenizer = Tokenizer.from_str(settings.decode())
    try:
        library = LibraryHere(tokenizer)
        pair = read_pair_template(tokenizer)
    except ConfigError as error:
        return json.dumps({"error": str(error)}).encode(), lambda question: b"-"
    before, after = (list(tokens) for tokens in library.around)
    greeting = {"before": before, "after": after, "pair": None if pair is None else asdict(pair)}

    def answer(question: bytes) -> bytes:
        texts, parse, offsets = json.loads(question)
        try:
            encoded = library.encode(texts, "", parse_special_tokens=parse, offsets=offsets)
        except BaseException as error:  # a panic in the library is no Exception
            return b"-" + str(error).encode()
        return b"+" + json.dumps([(list(one.ids), one.offsets) for one in encoded]).encode()

    return json.dumps(greeting).encode(), answer


if __name__ == "__main__":
    sys.exit(serve_parent(make))
