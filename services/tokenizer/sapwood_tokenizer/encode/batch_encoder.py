"""Encodes lists of texts with the library, cutting them at safe boundaries and skipping parts whose ids are cached.

This class, not the library, puts special tokens (BOS) around a text: a tokenizer's post-processor adds the same ones to every
single text, so they are found out once and the caches need not know of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_tokenizer.encode.encode_cache import EncodeCache
from sapwood_tokenizer.encode.safe_boundary import SafeBoundaries

PartKey = tuple[str, bool, str]
"""A salt, whether the part is the first of its text, and the part."""

_PROBES = 1000


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's tokens.

    Attributes:
        ids: Token ids; not to be changed.
        offsets: For each token the first and the one after the last character of the text that it stands for; (0, 0) for
            those put around it. None if they were not asked for.
    """

    ids: array[int]
    offsets: Sequence[tuple[int, int]] | None = None


class EncodeStoppedError(Exception):
    """A text takes too much time or memory; the message says which."""


class Library(Protocol):
    """Encodes with the library, here or elsewhere. Thread-safe.

    Attributes:
        around: The tokens that the tokenizer puts before and after a text.
        elsewhere: Whether other processes encode, each caller's texts in fair turns: threads only wait for them.
        encoded: Texts that were encoded so far, by the library that did it.
    """

    around: tuple[array[int], array[int]]
    elsewhere: bool
    encoded: dict[str, int]

    def encode(self, texts: Sequence[str], caller: str, *, parse_special_tokens: bool, offsets: bool) -> list[Encoded]:
        """The tokens of each text, without special tokens around it; ``caller`` is whose texts they are.

        Raises:
            EncodeStoppedError: They take too much time or memory.
            BaseException: The library fails on a text.
        """
        ...


class LibraryHere(Library):
    """Encodes in this process, on the thread that asks.

    Args:
        tokenizer: The tokenizer; neither it nor its parts may be changed any more.

    Raises:
        ConfigError: The tokenizer does more to a text than put tokens around it after encoding it.
    """

    elsewhere = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._plain: Tokenizer | None = None
        self.encoded = {"tokenizers": 0}
        self.around = _tokens_around(tokenizer)

    def encode(self, texts: Sequence[str], caller: str, *, parse_special_tokens: bool, offsets: bool) -> list[Encoded]:
        """As :meth:`Library.encode`."""
        self.encoded["tokenizers"] += len(texts)
        tokenizer = self._tokenizer if parse_special_tokens else self._plain_tokenizer()
        if offsets:
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            return [Encoded(array("I", encoding.ids), encoding.offsets) for encoding in encodings]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [Encoded(array("I", encoding.ids)) for encoding in encodings]

    def _plain_tokenizer(self) -> Tokenizer:
        if self._plain is None:  # two threads may both make one; they are equal
            self._plain = _without_special_tokens(self._tokenizer)
        return self._plain


class BatchEncoder:
    """Encodes batches. Thread-safe.

    Args:
        tokenizer: The tokenizer; neither it nor its parts may be changed any more.
        parts: Ids of parts of texts (L1).
        library: Encodes; None: this process does.

    Raises:
        ConfigError: The tokenizer does more to a text than put tokens around it after encoding it.
    """

    def __init__(self, tokenizer: Tokenizer, parts: EncodeCache[PartKey], library: Library | None = None) -> None:
        self._parts = parts
        self._boundaries = SafeBoundaries(tokenizer)
        self._library = library or LibraryHere(tokenizer)
        self._before, self._after = self._library.around

    def with_tokens_around(self, encoded: Encoded) -> Encoded:
        """The same with the model's own special tokens around it."""
        if not self._before and not self._after:
            return encoded
        nowhere = (0, 0)
        offsets = encoded.offsets
        if offsets is not None:
            offsets = [*[nowhere] * len(self._before), *offsets, *[nowhere] * len(self._after)]
        return Encoded(self._before + encoded.ids + self._after, offsets)

    @property
    def encoded(self) -> dict[str, int]:
        """Texts and parts of texts that were encoded so far, by the library that did it."""
        return self._library.encoded

    def encode(
        self,
        texts: Sequence[str],
        salts: Sequence[str] = (),
        *,
        parse_special_tokens: bool = True,
        offsets: bool = False,
    ) -> list[Encoded]:
        """The tokens of each text, without special tokens around it.

        Args:
            texts: Any number of texts.
            salts: One for each text, which then shares the cache only with texts of the same salt. Empty: no text has one.
            parse_special_tokens: Whether the text of a special token is that token; else it is text like any other.
            offsets: Whether offsets are wanted; then texts are encoded whole, without the cache.
        """
        if not offsets and parse_special_tokens and self._parts.enabled and self._boundaries.lead is not None:
            return self._encode_parts(texts, salts or [""] * len(texts), self._boundaries.lead)
        caller = salts[0] if salts else ""
        return self._library.encode(texts, caller, parse_special_tokens=parse_special_tokens, offsets=offsets)

    def _encode_parts(self, texts: Sequence[str], salts: Sequence[str], lead: str) -> list[Encoded]:
        results: list[list[array[int] | None]] = []
        missing: list[tuple[list[array[int] | None], int, PartKey, bool]] = []  # result, index, key, whether kept
        for text, salt in zip(texts, salts, strict=True):
            cut = self._boundaries.cut(text)
            last = len(cut) - 1
            result: list[array[int] | None] = []
            for place, part in enumerate(cut):
                # The last part, which no boundary ends, comes again only in the same text, which L0 knows.
                key = (salt, place == 0, part)
                ids = self._parts.get(key) if place < last else None
                if ids is None and part:
                    missing.append((result, place, key, place < last))
                result.append(ids)
            results.append(result)
        inputs = [part if first else lead + part for _, _, (_, first, part), _ in missing]
        encodings: list[Encoded] = []
        if inputs:
            encodings = self._library.encode(inputs, salts[0], parse_special_tokens=True, offsets=False)
        for (result, place, key, kept), encoding in zip(missing, encodings, strict=True):
            _, first, part = key
            ids = encoding.ids if first else encoding.ids[1:]
            result[place] = ids
            if kept:
                self._parts.put(key, part, ids)
        return [Encoded(_joined(result)) for result in results]


def _joined(parts: Sequence[array[int] | None]) -> array[int]:
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    joined = array("I")
    for part in parts:
        if part is not None:  # an empty last part has no ids
            joined += part
    return joined


def _tokens_around(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    probes = ["a", "1", *islice(tokenizer.get_vocab(with_added_tokens=False), _PROBES)]
    for probe in probes:
        inside = tokenizer.encode(probe, add_special_tokens=False).ids
        if not inside:
            continue
        whole = tokenizer.encode(probe).ids
        for start in range(len(whole) - len(inside) + 1):
            if whole[start : start + len(inside)] == inside:
                return array("I", whole[:start]), array("I", whole[start + len(inside) :])
        raise ConfigError("the tokenizer's post-processor does more than put tokens around a text")
    raise ConfigError("the tokenizer encodes no text")


def _without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer for texts in which special tokens are plain text. Shares the model where that is possible."""
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    if tokenizer.post_processor is not None:
        plain.post_processor = tokenizer.post_processor
    added = tokenizer.get_added_tokens_decoder()
    in_order = [token for _, token in sorted(added.items())]
    for special, tokens in groupby(in_order, key=lambda token: token.special):
        (plain.add_special_tokens if special else plain.add_tokens)(list(tokens))
    if any(plain.token_to_id(token.content) != index for index, token in added.items()):
        plain = Tokenizer.from_str(tokenizer.to_str())  # ids with gaps; costs a second copy of the vocabulary
    plain.encode_special_tokens = True
    return plain
