"""Encodes texts for many callers at once, off the event loop.

Two lanes, each with threads of its own, so that a short text never waits for a long one:

- Short texts: a free thread takes all waiting texts, up to a bound, as one batch; texts that arrive while all threads are busy
  form the next one. So batches grow with the load and a lone request waits for nothing. A request of many short texts is split
  into parts, which take turns with others'.
- Long texts, which take up to seconds, are encoded one by one.

A batch is encoded on the thread that took it. The library's own pool (``TOKENIZERS_PARALLELISM``, off unless set) costs more
than it gains for short texts, and one long text would occupy all of it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from tokenizers import Tokenizer

from sapwood_common.contract.limits import MOST_GAPS
from sapwood_common.errors import InvalidArgumentError, PromptTooLongError
from sapwood_tokenizer.encode.batch_encoder import BatchEncoder, Encoded, EncodeStoppedError, Library, PartKey
from sapwood_tokenizer.encode.encode_cache import CacheStats, EncodeCache
from sapwood_tokenizer.encode.pipeline import token_lengths

logger = logging.getLogger(__name__)

_SHORT_COST = 64 * 1024
"""The most of one caller's texts that goes into a batch, in characters. A text that costs more is a long one."""
_BATCH_COST = 256 * 1024
"""The most that goes into a batch, in characters: bounds how long the next batch waits."""
_WAITING_THREADS = 32
"""Threads of each lane that wait for other processes, where those encode."""
_COST_A_TEXT = 64
"""Characters that a text costs besides its own."""
_LONGEST_LOOKED_UP = 256 * 1024
"""Characters of the longest text that L0 is asked about: hashing it blocks the event loop."""


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Limits and sizes.

    Attributes:
        max_text_bytes: The longest text taken, in bytes of UTF-8.
        max_text_tokens: The most tokens a text may have, those around it included; None is no limit.
        threads: Threads that encode short texts; half as many, at least one, encode long ones.
        exact_cache_bytes: Budget in bytes of L0, whole texts.
        prefix_cache_bytes: Budget in bytes of L1, parts of texts.
    """

    max_text_bytes: int
    max_text_tokens: int | None = None
    threads: int = 2
    exact_cache_bytes: int = 0
    prefix_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """The options of one request.

    Attributes:
        add_special_tokens: Whether the model's own special tokens, such as BOS, are put around each text.
        parse_special_tokens: Whether the text of a special token is that token; else it is text like any other.
        offsets: Whether each token's place in the text is wanted. Then no cache is asked.
        max_tokens: The most tokens a text may have, if fewer than the service's own limit.
        salt: Texts share the cache only with texts of the same salt.
        suffix: What comes after the gap that each text ends at: the tokens then ask the model to fill it. "": there is no gap.
    """

    add_special_tokens: bool = True
    parse_special_tokens: bool = True
    offsets: bool = False
    max_tokens: int | None = None
    salt: str = ""
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str
    """The library's error message."""


_Result = Encoded | _Failed


@dataclass(frozen=True, slots=True)
class _Job:
    texts: Sequence[str]
    salt: str
    cost: int
    kind: tuple[bool, bool]
    """Whether special tokens are parsed, and whether offsets are wanted: all texts of a batch are of one kind."""
    done: asyncio.Future[list[_Result]]


class Encoder:
    """Encodes for many callers at once. Lives on one event loop.

    Args:
        tokenizer: The tokenizer; not to be changed from now on.
        options: Limits and sizes.
        library: Encodes; None: the ``tokenizers`` library does, in this process.

    Raises:
        ConfigError: The tokenizer cannot be used; see BatchEncoder.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncoderOptions, library: Library | None = None) -> None:
        self._options = options
        self._exact: EncodeCache[tuple[str, bool, str]] = EncodeCache(options.exact_cache_bytes)
        self._parts: EncodeCache[PartKey] = EncodeCache(options.prefix_cache_bytes)
        self._batches = BatchEncoder(tokenizer, self._parts, library)
        elsewhere = library is not None and library.elsewhere
        self._fill_in_middle = None if elsewhere else find_form(tokenizer)
        self._lengths = token_lengths(tokenizer)
        threads = _WAITING_THREADS if elsewhere else options.threads
        self._batch_cost = 1 if elsewhere else _BATCH_COST  # what is ended takes nobody else's text with it
        self._free_threads = threads
        self._waiting: deque[_Job] = deque()
        self._short_threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._long_threads = ThreadPoolExecutor(max(1, threads // 2), thread_name_prefix="encode-long")

    @property
    def fill_in_middle(self) -> FillInMiddle | None:
        """How the model is asked to fill a gap; None: the vocabulary has no tokens for that."""
        return self._fill_in_middle

    @property
    def encoded(self) -> dict[str, int]:
        """Texts and parts of texts that were encoded so far, by the library that did it."""
        return self._batches.encoded

    @property
    def exact_cache(self) -> CacheStats:
        """Statistics of L0."""
        return self._exact.stats()

    @property
    def prefix_cache(self) -> CacheStats:
        """Statistics of L1."""
        return self._parts.stats()

    async def encode(
        self, texts: Sequence[str], options: EncodeOptions = EncodeOptions(), *, field: str = "texts"
    ) -> list[Encoded]:
        """The tokens of each text.

        Args:
            texts: Any number of texts.
            options: What is wanted.
            field: The caller's field of the texts, for errors.

        Raises:
            InvalidArgumentError: A text is too long, in bytes or in tokens, or holds half a surrogate pair, or the library
                fails on it; its index is named. Or there is a suffix, and the model fills no gaps.
        """
        names = [f"{field}[{index}]" if field == "texts" else field for index in range(len(texts))]
        fill = self._form_for(texts, options) if options.suffix else None
        if fill is not None:
            texts, names = [*texts, fill.lead + options.suffix], [*names, "suffix"]
        for name, text in zip(names, texts, strict=True):
            try:
                size = len(text) if text.isascii() else len(text.encode())
            except UnicodeEncodeError as error:
                raise InvalidArgumentError(
                    "the text holds half a surrogate pair, which is no text", field=name
                ) from error
            if size > self._options.max_text_bytes:
                raise PromptTooLongError.in_bytes(size, self._options.max_text_bytes, field=name)
        limits = [limit for limit in (options.max_tokens, self._options.max_text_tokens) if limit is not None]
        if limits and self._lengths is not None:
            for name, text in zip(names, texts, strict=True):
                if self._lengths.exceeds(text, min(limits)):  # refused before it takes seconds
                    raise PromptTooLongError.of(self._lengths.least(text, min(limits)), min(limits), field=name)
        kind, salt = (options.parse_special_tokens, options.offsets), options.salt
        results = await (self._run(texts, salt, kind) if options.offsets else self._look_up_or_run(texts, salt, kind))
        for name, result in zip(names, results, strict=True):
            if isinstance(result, _Failed):
                raise InvalidArgumentError(f"the tokenizer cannot encode the text: {result.reason}", field=name)
        encoded = [result for result in results if isinstance(result, Encoded)]
        if fill is not None:
            *before, after = encoded
            encoded = [Encoded(fill.prompt(one.ids, after.ids)) for one in before]
        if options.add_special_tokens:
            encoded = [self._batches.with_tokens_around(one) for one in encoded]
        if limits:
            for name, one in zip(names, encoded, strict=False):
                if len(one.ids) > min(limits):
                    raise PromptTooLongError.of(len(one.ids), min(limits), field=name)
        return encoded

    def close(self) -> None:
        """Ends the threads and cancels waiting texts; nothing may be encoded any more."""
        self._short_threads.shutdown(wait=False, cancel_futures=True)
        self._long_threads.shutdown(wait=False, cancel_futures=True)

    def _form_for(self, texts: Sequence[str], options: EncodeOptions) -> FillInMiddle:
        if self._fill_in_middle is None:
            raise InvalidArgumentError(
                "the model's vocabulary has no tokens for what comes after a gap (fill-in-the-middle)", field="suffix"
            )
        if options.offsets:
            raise InvalidArgumentError("there are no offsets with a suffix", field="return_offsets")
        if len(texts) > MOST_GAPS:
            raise InvalidArgumentError(f"at most {MOST_GAPS} texts go with a suffix", field="texts")
        return self._fill_in_middle

    async def _look_up_or_run(self, texts: Sequence[str], salt: str, kind: tuple[bool, bool]) -> list[_Result]:
        if not self._exact.enabled:
            return await self._run(texts, salt, kind)
        parse, _ = kind
        results: list[_Result | None] = []
        for text in texts:
            ids = self._exact.get((salt, parse, text)) if len(text) <= _LONGEST_LOOKED_UP else None
            results.append(None if ids is None else Encoded(ids))
        missing = [index for index, result in enumerate(results) if result is None]
        encoded = await self._run([texts[index] for index in missing], salt, kind)
        for index, result in zip(missing, encoded, strict=True):
            results[index] = result
            if isinstance(result, Encoded) and len(texts[index]) <= _LONGEST_LOOKED_UP:
                self._exact.put((salt, parse, texts[index]), texts[index], result.ids)
        return [result for result in results if result is not None]

    async def _run(self, texts: Sequence[str], salt: str, kind: tuple[bool, bool]) -> list[_Result]:
        loop = asyncio.get_running_loop()
        results: list[_Result] = []
        for part, cost in _parts(texts):
            if cost > _SHORT_COST:
                salts = [salt] * len(part)
                results += await loop.run_in_executor(self._long_threads, self._encode, part, salts, kind)
            else:
                job = _Job(part, salt, cost, kind, loop.create_future())
                self._waiting.append(job)
                self._start_batches()
                results += await job.done
        return results

    def _start_batches(self) -> None:
        while self._free_threads and (batch := self._next_batch()):
            self._free_threads -= 1
            texts = [text for job in batch for text in job.texts]
            salts = [job.salt for job in batch for _ in job.texts]
            running = asyncio.get_running_loop().run_in_executor(
                self._short_threads, self._encode, texts, salts, batch[0].kind
            )
            running.add_done_callback(partial(self._end_batch, batch))

    def _next_batch(self) -> list[_Job]:
        batch: list[_Job] = []
        others: list[_Job] = []
        cost = 0
        while self._waiting and cost < self._batch_cost:
            job = self._waiting.popleft()
            if job.done.done():
                continue  # its caller is gone
            if batch and (job.kind != batch[0].kind or cost + job.cost > self._batch_cost):
                others.append(job)
                if job.kind == batch[0].kind:
                    break
            else:
                batch.append(job)
                cost += job.cost
        self._waiting.extendleft(reversed(others))
        return batch

    def _end_batch(self, batch: Sequence[_Job], running: asyncio.Future[list[_Result]]) -> None:
        self._free_threads += 1
        if not running.cancelled():
            self._start_batches()
        error = asyncio.CancelledError() if running.cancelled() else running.exception()
        at = 0
        for job in batch:
            if not job.done.done():
                if error is not None:
                    job.done.set_exception(error)
                else:
                    job.done.set_result(running.result()[at : at + len(job.texts)])
            at += len(job.texts)

    def _encode(self, texts: Sequence[str], salts: Sequence[str], kind: tuple[bool, bool]) -> list[_Result]:
        parse_special_tokens, offsets = kind
        try:
            return [*self._batches.encode(texts, salts, parse_special_tokens=parse_special_tokens, offsets=offsets)]
        except EncodeStoppedError as error:
            return [_Failed(str(error))] * len(texts)
        except BaseException as error:  # a panic in the library is no Exception
            if len(texts) > 1:  # find out which of them failed
                single = zip(texts, salts, strict=True)
                return [result for text, salt in single for result in self._encode([text], [salt], kind)]
            logger.error("the tokenizer library failed on a text", exc_info=error)
            return [_Failed(str(error))]


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


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes the prompt: a token, the one text, a token, the other text, a token if there is a third.

    Attributes:
        tokens: Those two or three.
        suffix_first: Whether the text after the gap comes first.
        ends: Further tokens that end the filled-in text, besides those of the form and the end of the text: in the family's
            training data the next file begins there.
    """

    tokens: tuple[str, ...]
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


_FORMS = (
    # Qwen2.5-Coder and later, CodeGemma
    _Form(
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite, Stable Code
    _Form(
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ends=("<fim_pad>", "<filename>", "<reponame>", "<repo_name>", "<file_sep>"),
    ),
    _Form(("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ends=("<fim-pad>",)),  # SantaCoder
    _Form(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),  # DeepSeek-Coder, DeepSeek-V2 and later
    _Form(("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"), suffix_first=True),  # Seed-Coder
    _Form(("[SUFFIX]", "[PREFIX]"), suffix_first=True, ends=("[MIDDLE]",)),  # Codestral
    _Form(("▁<PRE>", "▁<SUF>", "▁<MID>"), ends=("▁<EOT>",)),  # Code Llama
)

_LEAD = "\u263a"
"""A character that no token holds together with the next one."""


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Writes the prompts of a vocabulary that has the tokens.

    Attributes:
        lead: What the text after the gap is encoded behind, so that no space is put before it.
        end_token_ids: Tokens that end what is filled in, besides the model's own end tokens.
    """

    tokens: tuple[int, ...]
    suffix_first: bool
    lead: str
    lead_tokens: int
    end_token_ids: tuple[int, ...]

    def prompt(self, before: array[int], after: array[int]) -> array[int]:
        """The prompt.

        Args:
            before: The tokens of the text before the gap.
            after: Those of ``lead`` and the text after it.
        """
        texts = [before, after[self.lead_tokens :]]
        if self.suffix_first:
            texts.reverse()
        first, second, *last = self.tokens
        return array("I", [first]) + texts[0] + array("I", [second]) + texts[1] + array("I", last)


def find_form(tokenizer: Tokenizer) -> FillInMiddle | None:
    """The form whose tokens the vocabulary has; None if it has those of none."""
    for form in _FORMS:
        tokens = _ids(tokenizer, form.tokens)
        if len(tokens) == len(form.tokens):
            lead = tokenizer.encode(_LEAD, add_special_tokens=False).ids
            spaced = bool(lead) and lead[0] == tokenizer.token_to_id("▁")
            return FillInMiddle(
                tokens,
                form.suffix_first,
                lead=_LEAD if spaced else "",
                lead_tokens=len(lead) if spaced else 0,
                end_token_ids=(*tokens, *_ids(tokenizer, form.ends)),
            )
    return None


def _ids(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[int, ...]:
    found = map(tokenizer.token_to_id, texts)
    return tuple(token for token in found if token is not None)
