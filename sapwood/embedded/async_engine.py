"""The engine for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TextIO, Unpack, overload

from sapwood.client import AsyncGeneration
from sapwood.embedded.batches import Batches, Score, is_one
from sapwood.embedded.engine import one_of
from sapwood.embedded.private_cluster import PrivateCluster
from sapwood.embedding import Embeddings, EmbedOptions
from sapwood.generation import Answer, Options

Message = Mapping[str, Any]


class AsyncEngine:
    """:class:`~sapwood.embedded.engine.Engine` for asyncio: the same arguments and methods, awaited.

        async with sapwood.AsyncEngine("demo") as engine:
            async for delta in engine.stream("The capital of France is", max_tokens=16):
                print(delta.text, end="", flush=True)

    Belongs to the event loop that it is started in. Calls that are awaited at a time are batched, whichever they are.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        workers: int = 1,
        timeout: float | None = None,
        logs: TextIO | None = None,
        **options: Any,
    ) -> None:
        self._cluster = PrivateCluster(model, workers, options, logs)
        self._timeout = timeout
        self._batches: Batches | None = None
        self._end = weakref.finalize(self, self._cluster.close)  # also at the program's end

    async def start(self) -> Self:
        """Loads the model; returns once it answers. Raises what :meth:`sapwood.embedded.engine.Engine.start` does."""
        if self._batches is not None:
            return self
        starting = asyncio.ensure_future(asyncio.to_thread(self._cluster.start))
        try:
            places = await asyncio.shield(starting)
        except BaseException:
            await asyncio.to_thread(self._cluster.background.kill)
            await asyncio.gather(starting, return_exceptions=True)  # looks at its error, which asyncio would print
            await asyncio.to_thread(self._end)
            raise
        self._batches = self._cluster.connect(places, self._timeout)
        return self

    async def close(self) -> None:
        """Stops everything; calls that run end with CancelledError. May be called again."""
        batches, self._batches = self._batches, None
        try:
            if batches is not None:
                await batches.close()
        finally:
            await asyncio.to_thread(self._end)

    @overload
    async def generate(self, prompts: str | Sequence[int], **options: Unpack[Options]) -> Answer: ...

    @overload
    async def generate(self, prompts: list[str] | list[list[int]], **options: Unpack[Options]) -> list[Answer]: ...

    async def generate(self, prompts: Any, **options: Unpack[Options]) -> Any:
        """Continues a prompt, or each of a list of them."""
        if is_one(prompts):
            return (await self._asked.generate([prompts], one_of(options)))[0]
        return await self._asked.generate([*prompts], options)

    @overload
    async def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Answer: ...

    @overload
    async def chat(self, messages: list[list[Message]], **options: Unpack[Options]) -> list[Answer]: ...

    async def chat(self, messages: Any, **options: Unpack[Options]) -> Any:
        """Answers a conversation, or each of a list of them."""
        if is_one(messages):
            return (await self._asked.chat([messages], one_of(options)))[0]
        return await self._asked.chat([*messages], options)

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """Starts a generation and returns at once: ``async for`` gives the deltas; leaving its ``async with`` block stops it."""
        return self._asked.client.generate(text, messages=messages, token_ids=token_ids, **options)

    async def embed(self, inputs: str | Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """The vectors of a text, or of any number of texts and token sequences."""
        given = [inputs] if isinstance(inputs, str) else [*inputs]
        return await self._asked.embed(given, options)

    async def score(self, pairs: Iterable[tuple[str | Sequence[int], str | Sequence[int]]]) -> list[Score]:
        """How likely each continuation is after its prompt."""
        return await self._asked.score([*pairs])

    @overload
    async def tokenize(self, texts: str, *, special: bool = True) -> list[int]: ...

    @overload
    async def tokenize(self, texts: list[str], *, special: bool = True) -> list[list[int]]: ...

    async def tokenize(self, texts: Any, *, special: bool = True) -> Any:
        """The token ids of a text, or of each of a list."""
        if isinstance(texts, str):
            return (await self._asked.tokenize([texts], special=special))[0]
        return await self._asked.tokenize(texts, special=special)

    @overload
    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @overload
    async def detokenize(self, token_ids: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]: ...

    async def detokenize(self, token_ids: Any, *, skip_special_tokens: bool = True) -> Any:
        """The text of token ids, or of each of a list of them."""
        if is_one(token_ids):
            return (await self._asked.detokenize([token_ids], skip_special_tokens=skip_special_tokens))[0]
        return await self._asked.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def address(self) -> str:
        """Where its router listens: a Unix socket. Raises UnavailableError if it does not run."""
        return self._asked.client.address

    @property
    def _asked(self) -> Batches:
        self._cluster.background.check()
        assert self._batches is not None
        return self._batches

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
