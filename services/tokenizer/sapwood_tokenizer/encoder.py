"""Encodes texts off the event loop, in batches.

Short texts: what arrives while a batch is being encoded waits and becomes the next batch, which the library spreads over the
cores; so batches grow with the load and a lone request waits for nothing. A request of many short texts goes in parts, in turn
with the others'. Long texts, which take seconds, are encoded one by one on threads of their own: a batch of one text is
encoded on the thread that calls, so they take neither the batches' thread nor the library's pool.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tokenizers import Tokenizer

from sapwood_common.errors import InvalidArgumentError

_SHORT_COST = 64 * 1024
"""The most of one caller's that goes into one batch, in characters."""
_BATCH_COST = 256 * 1024
"""The most that goes into one batch: bounds how long the next one waits."""
_COST_A_TEXT = 64
"""What a text costs besides its characters."""


@dataclass(frozen=True, slots=True)
class _Job:
    texts: Sequence[str]
    cost: int
    add_special_tokens: bool
    done: asyncio.Future[list[Sequence[int]]]


class Encoder:
    """Encodes for many callers at once. Lives on one event loop.

    Args:
        tokenizer: Changed by nobody from now on.
        max_text_bytes: The longest text taken, in bytes of UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, max_text_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes
        self._waiting: list[_Job] = []
        self._batch_thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._long_threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="encode-long")
        self._worker: asyncio.Task[None] | None = None

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, field: str = "texts"
    ) -> list[Sequence[int]]:
        """The token ids of each text.

        Args:
            texts: Any number of texts.
            add_special_tokens: Whether the model's own special tokens, such as BOS, are put around each.
            field: How the caller spells the texts, for errors.

        Raises:
            InvalidArgumentError: A text is too long; its index is named.
        """
        for index, text in enumerate(texts):
            size = len(text.encode()) if len(text) * 4 > self._max_text_bytes else 0
            if size > self._max_text_bytes:
                raise InvalidArgumentError(
                    f"a text of {size} bytes is longer than the limit of {self._max_text_bytes}",
                    field=f"{field}[{index}]" if field == "texts" else field,
                )
        ids: list[Sequence[int]] = []
        for part, cost in _parts(texts):
            if cost > _SHORT_COST:
                ids.append(await self._encode_long(part[0], add_special_tokens))
            else:
                ids += await self._encode_short(part, cost, add_special_tokens)
        return ids

    def close(self) -> None:
        """Lets the threads go; what waits is cancelled, and nothing may be encoded any more."""
        self._batch_thread.shutdown(wait=False, cancel_futures=True)
        self._long_threads.shutdown(wait=False, cancel_futures=True)

    async def _encode_long(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        loop = asyncio.get_running_loop()
        (ids,) = await loop.run_in_executor(self._long_threads, self._run, [text], add_special_tokens)
        return ids

    async def _encode_short(self, texts: Sequence[str], cost: int, add_special_tokens: bool) -> list[Sequence[int]]:
        job = _Job(texts, cost, add_special_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await job.done

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            texts = [text for job in batch for text in job.texts]
            try:
                results = await loop.run_in_executor(self._batch_thread, self._run, texts, batch[0].add_special_tokens)
            except Exception as error:
                for job in batch:
                    if not job.done.done():
                        job.done.set_exception(error)
                continue
            at = 0
            for job in batch:
                if not job.done.done():
                    job.done.set_result(results[at : at + len(job.texts)])
                at += len(job.texts)

    def _next_batch(self) -> list[_Job]:
        batch: list[_Job] = []
        rest: list[_Job] = []
        cost = 0
        for job in self._waiting:
            if job.done.done():
                continue  # its caller is gone
            same = not batch or job.add_special_tokens == batch[0].add_special_tokens
            if same and cost + job.cost <= _BATCH_COST:
                batch.append(job)
                cost += job.cost
            else:
                rest.append(job)
        self._waiting = rest
        return batch

    def _run(self, texts: Sequence[str], add_special_tokens: bool) -> list[Sequence[int]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:  # a panic in the library is no Exception
            raise RuntimeError("the tokenizer library failed") from error
        return [array("I", encoding.ids) for encoding in encodings]


def _parts(texts: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """The texts in order, in parts that cost at most _SHORT_COST; a text that costs more alone is a part."""
    part: list[str] = []
    total = 0
    for text in texts:
        cost = len(text) + _COST_A_TEXT
        if part and total + cost > _SHORT_COST:
            yield part, total
            part, total = [], 0
        part.append(text)
        total += cost
    if part:
        yield part, total
