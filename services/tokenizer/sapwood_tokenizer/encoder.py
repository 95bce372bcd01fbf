"""Encodes texts for many callers at once, off the event loop.

A job goes to a free thread at once; what arrives while all are busy waits and becomes the next batch, so batches grow with the
load and a lone request waits for nothing. The library's own parallelism is not used (it costs more than it gives for short
texts): each thread encodes its batch alone, and the library lets the others run meanwhile. Long texts have their own queue and
leave one thread to the others, so short texts never wait for a long one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from tokenizers import Tokenizer

from sapwood_common.errors import InvalidArgumentError
from sapwood_tokenizer.batch_encoder import BatchEncoder, Encoded
from sapwood_tokenizer.encode_cache import CacheStats, EncodeCache

_BATCH_CHARACTERS = 256 * 1024
"""Texts gathered into one batch, at most: bounds how long a short text waits behind it. A longer job is a long one."""

_LONGEST_LOOKED_UP = 256 * 1024
"""Characters of the longest text that L0 is asked about: hashing it is done on the event loop."""


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Limits and sizes.

    Attributes:
        max_text_bytes: The longest text taken, in bytes of UTF-8.
        max_text_tokens: The most tokens a text may have; None is no limit.
        threads: Encode at a time; at least two are used, so that a long text holds nobody up.
        exact_cache_bytes: Budget of L0, whole texts.
        prefix_cache_bytes: Budget of L1, parts of texts.
    """

    max_text_bytes: int
    max_text_tokens: int | None = None
    threads: int = 2
    exact_cache_bytes: int = 0
    prefix_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What is wanted of one request.

    Attributes:
        add_special_tokens: Put the model's own special tokens, such as BOS, around each text.
        parse_special_tokens: Read the text of a special token as that token; else it is text like any other.
        offsets: Tell where in the text each token is.
    """

    add_special_tokens: bool = True
    parse_special_tokens: bool = True
    offsets: bool = False


@dataclass(slots=True)
class _Job:
    texts: Sequence[str]
    options: EncodeOptions
    done: asyncio.Future[list[Encoded]]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.texts))


class Encoder:
    """Encodes for many callers at once. Lives on one event loop.

    Args:
        tokenizer: The tokenizer.
        options: Limits and sizes.

    Raises:
        ConfigError: The tokenizer cannot be used; see BatchEncoder.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncoderOptions) -> None:
        self._options = options
        self._exact: EncodeCache[tuple[bool, str]] = EncodeCache(options.exact_cache_bytes)
        self._parts: EncodeCache[tuple[bool, str]] = EncodeCache(options.prefix_cache_bytes)
        self._batches = BatchEncoder(tokenizer, self._parts)
        self._threads = max(2, options.threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="encode")
        self._short: deque[_Job] = deque()
        self._long: deque[_Job] = deque()
        self._running = 0
        self._running_long = 0

    @property
    def exact_cache(self) -> CacheStats:
        """What L0 did."""
        return self._exact.stats()

    @property
    def prefix_cache(self) -> CacheStats:
        """What L1 did."""
        return self._parts.stats()

    async def encode(
        self, texts: Sequence[str], options: EncodeOptions = EncodeOptions(), *, field: str = "texts"
    ) -> list[Encoded]:
        """The tokens of each text.

        Args:
            texts: Any number of texts.
            options: What is wanted.
            field: How the caller spells the texts, for errors.

        Raises:
            InvalidArgumentError: A text is too long, in bytes or in tokens; its index is named.
        """
        for index, text in enumerate(texts):
            size = len(text.encode()) if len(text) * 4 > self._options.max_text_bytes else 0
            if size > self._options.max_text_bytes:
                raise InvalidArgumentError(
                    f"a text of {size} bytes is longer than the limit of {self._options.max_text_bytes}",
                    field=_field(field, index),
                )
        results = await (self._run(texts, options) if options.offsets else self._look_up_or_run(texts, options))
        most = self._options.max_text_tokens
        if most is not None:
            for index, result in enumerate(results):
                if len(result.ids) > most:
                    raise InvalidArgumentError(
                        f"a text of {len(result.ids)} tokens is longer than the limit of {most}",
                        field=_field(field, index),
                    )
        return results

    async def _look_up_or_run(self, texts: Sequence[str], options: EncodeOptions) -> list[Encoded]:
        found: list[array[int] | None] = [None] * len(texts)
        if self._exact.enabled:
            for index, text in enumerate(texts):
                if len(text) <= _LONGEST_LOOKED_UP:
                    found[index] = self._exact.get((options.parse_special_tokens, text))
        missing = [index for index, ids in enumerate(found) if ids is None]
        if missing:
            encoded = await self._run([texts[index] for index in missing], options)
            for index, result in zip(missing, encoded, strict=True):
                assert isinstance(result.ids, array)
                found[index] = result.ids
                if self._exact.enabled and len(texts[index]) <= _LONGEST_LOOKED_UP:
                    self._exact.put((options.parse_special_tokens, texts[index]), texts[index], result.ids)
        around = self._batches.around if options.add_special_tokens else None
        return [Encoded(around(ids) if around else ids) for ids in found if ids is not None]

    async def _run(self, texts: Sequence[str], options: EncodeOptions) -> list[Encoded]:
        if not texts:
            return []
        job = _Job(texts, options, asyncio.get_running_loop().create_future())
        (self._long if job.size > _BATCH_CHARACTERS else self._short).append(job)
        self._dispatch()
        return await job.done

    def _dispatch(self) -> None:
        while self._running < self._threads:
            batch, is_long = self._next_batch()
            if not batch:
                return
            self._running += 1
            self._running_long += is_long
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._encode_batch, batch)
            future.add_done_callback(partial(self._finish, batch, is_long))

    def _next_batch(self) -> tuple[list[_Job], bool]:
        while self._long and self._running_long < self._threads - 1:
            job = self._long.popleft()
            if not job.done.done():  # else its caller is gone
                return [job], True
        batch: list[_Job] = []
        size = 0
        while self._short and (not batch or size + self._short[0].size <= _BATCH_CHARACTERS):
            job = self._short.popleft()
            if not job.done.done():
                batch.append(job)
                size += job.size
        return batch, False

    def _finish(self, batch: list[_Job], is_long: bool, future: asyncio.Future[list[list[Encoded]]]) -> None:
        self._running -= 1
        self._running_long -= is_long
        self._dispatch()
        error = future.exception()
        if error is not None:
            for job in batch:
                if not job.done.done():
                    job.done.set_exception(error)
            return
        for job, result in zip(batch, future.result(), strict=True):
            if not job.done.done():
                job.done.set_result(result)

    def _encode_batch(self, batch: list[_Job]) -> list[list[Encoded]]:
        """The tokens of the texts of each job: without those around a text, offsets aside. Runs in a thread."""
        results: list[list[Encoded]] = [[] for _ in batch]
        for parse_special_tokens in (True, False):
            jobs = [
                (job, result)
                for job, result in zip(batch, results, strict=True)
                if job.options.parse_special_tokens == parse_special_tokens
            ]
            for job, result in jobs:
                if job.options.offsets:
                    result += self._batches.encode_with_offsets(
                        job.texts,
                        parse_special_tokens=parse_special_tokens,
                        add_special_tokens=job.options.add_special_tokens,
                    )
            plain = [(job, result) for job, result in jobs if not job.options.offsets]
            texts = [text for job, _ in plain for text in job.texts]
            if texts:
                ids = iter(self._batches.encode(texts, parse_special_tokens=parse_special_tokens))
                for job, result in plain:
                    result += [Encoded(next(ids)) for _ in job.texts]
        return results


def _field(name: str, index: int) -> str:
    return f"{name}[{index}]" if name == "texts" else name
