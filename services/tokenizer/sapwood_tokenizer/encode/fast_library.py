"""Encodes with fastokens (Apache-2.0), where its ids are those of the ``tokenizers`` library, in about a hundredth of the time.

The ``tokenizers`` library stays the definition. fastokens holds the vocabulary a second time (about 120 MB) and takes a second
or two to load, so it is loaded once ``WORTH`` characters have been encoded: a service that is hardly used does without.
It then has to prove itself on ``odd_texts``: characters of all scripts, what Unicode makes hard, the vocabulary's own tokens
and added tokens. If one text of these differs, or the tokenizer is of a kind that fastokens does not
know, the ``tokenizers`` library continues alone, with a line in the log. Later every ``_CHECKED``-th call is compared too, and a
difference ends the use of fastokens in this process.

States: waiting -> loading -> fast or refused; fast -> refused. Only the loading thread leaves ``loading``.
"""

from __future__ import annotations

import logging
import random
import threading
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from sapwood_common.errors import ConfigError
from sapwood_tokenizer.config import LibraryName
from sapwood_tokenizer.encode.batch_encoder import Encoded, Library, LibraryHere

if TYPE_CHECKING:
    import fastokens

logger = logging.getLogger(__name__)

WORTH = 256 * 1024
"""Characters after which fastokens is loaded: 4 000 tokens take the ``tokenizers`` library 10 ms, loading takes 2 s."""
_CHECKED = 256
"""One in this many calls is compared, if its texts are short."""
_SHORT = 4096
"""Characters of the texts of a call that is compared."""
_ADDED, _RANDOM, _SOME = 256, 64, 200
"""Added tokens, texts of random tokens, and tokens of each, that are tried."""

_CHARACTERS = (
    *(range(0x3400), range(0x3400, 0xA000, 7), range(0xA000, 0xAC00), range(0xAC00, 0xD7B0, 7), range(0xD7B0, 0x10000)),
    *(range(0x10000, 0x32000, 31), range(0xE0000, 0xE0200, 7)),
)
"""Characters that are tried: all of the first plane, but few of the many Han characters and Hangul syllables."""
_ODD = (
    *("", " ", "a", "\n", "\x00", "a" * 3000, " " * 3000, "-" * 3000, "\n" * 300, "ab" * 1500, "\u0301" * 40),
    *("I'm you'LL we\u2019ve 'S 'x don't", "\ufeffmark", "  two", "x \n y\n\n z ", "_a__b-c.d"),
    "1234567890 12,345.67 1e-9 0x1F \u0663\u0664 \u00bd \u2167",
    "a\r\nb\r\n\r\n\tc \t d  e   f\u00a0g\u2003h\u3000i\u2028j\u2029k\u0085l\x0bm\x0cn ",
    "e\u0301 \u00e9 n\u0303 \ufb01 \u1e9b\u0323 \u212b \u1100\u1161\u11a8 \uac01 \u0958 \u2126 \u0130\u0131\u00df\u1e9e",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7\U0001f1ef 0\ufe0f\u20e3",
    "\u0645\u0631\u062d\u0628\u0627 \u202bx\u202c \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \U00020000\U00020bb7",
    "def f(x):\n\treturn {'a': [1, 2]}  # c\n\n\n",
    'https://a.b/c?d=e&f=%20#g <a href="x">y</a> \\n \\\\',
)


class FastLibrary(Library):
    """Encodes with fastokens as soon as it has proved itself. Thread-safe.

    Args:
        tokenizer: The tokenizer; neither it nor its parts may be changed any more.
        origin: Where the tokenizer comes from, for the log.
        at_once: Whether to load fastokens now, and to fail if it cannot be used.

    Raises:
        ConfigError: The tokenizer does more to a text than put tokens around it; or ``at_once``, and fastokens cannot be used.
    """

    elsewhere = False

    def __init__(self, tokenizer: Tokenizer, origin: str, *, at_once: bool = False) -> None:
        self._tokenizer = tokenizer
        self._origin = origin
        self._usual = LibraryHere(tokenizer)
        self.around = self._usual.around
        self.encoded = self._usual.encoded
        self.encoded["fastokens"] = 0
        self._fast: fastokens.Tokenizer | None = None
        self._left = WORTH
        self._calls = 0
        self._loading: threading.Thread | None = None
        if at_once:
            self._left = 0
            problem = self._load()
            if problem is not None:
                raise ConfigError(f"--encoder fastokens: {problem}")

    def encode(self, texts: Sequence[str], caller: str, *, parse_special_tokens: bool, offsets: bool) -> list[Encoded]:
        """As :meth:`Library.encode`. Offsets, and special tokens as plain text, are the ``tokenizers`` library's."""
        fast = self._fast
        if fast is None or offsets or not parse_special_tokens:
            if self._left > 0:
                self._count(texts)
            return self._usual.encode(texts, caller, parse_special_tokens=parse_special_tokens, offsets=offsets)
        encoded = _encode(fast, texts)
        self._calls += 1
        if self._calls % _CHECKED == 0 and sum(map(len, texts)) <= _SHORT:
            usual = self._usual.encode(texts, caller, parse_special_tokens=True, offsets=False)
            if usual != encoded:
                self._fast = None
                logger.error("fastokens gives other ids for a text; it is used no more")
                encoded = usual
        self.encoded["fastokens"] += len(texts)
        return encoded

    def wait(self) -> bool:
        """Waits until fastokens is loaded, if it is being loaded; returns whether it encodes."""
        if self._loading is not None:
            self._loading.join()
        return self._fast is not None

    def _count(self, texts: Sequence[str]) -> None:
        self._left -= sum(map(len, texts))
        if self._left <= 0 and self._loading is None:  # two threads may both come here: the second one loads in vain
            self._loading = threading.Thread(target=self._load_or_say, name="fastokens", daemon=True)
            self._loading.start()

    def _load_or_say(self) -> None:
        problem = self._load()
        if problem is not None:
            logger.info("%s: texts are encoded by the tokenizers library alone: %s", self._origin, problem)

    def _load(self) -> str | None:
        """Why fastokens cannot be used; None: it can."""
        try:
            from fastokens import Tokenizer as FastTokenizer
        except ImportError:
            return "fastokens is not installed"
        try:
            fast = FastTokenizer.from_json_str(self._tokenizer.to_str())
            for texts in _in_batches(odd_texts(self._tokenizer)):
                usual = self._usual.encode(texts, "", parse_special_tokens=True, offsets=False)
                for text, one, other in zip(texts, usual, _encode(fast, texts), strict=True):
                    if one.ids != other.ids:
                        return f"fastokens gives other ids for {text[:40]!r}"
        except BaseException as error:  # a panic in the library is no Exception
            return f"fastokens: {error}"
        self._fast = fast
        return None


def make_library(name: LibraryName, tokenizer: Tokenizer, origin: str) -> Library:
    """The library of a setting.

    Raises:
        ConfigError: The tokenizer cannot be used, or not with this library.
    """
    if name == "tokenizers":
        return LibraryHere(tokenizer)
    return FastLibrary(tokenizer, origin, at_once=name == "fastokens")


def odd_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts on which two implementations of a tokenizer are likely to differ; the same ones each time."""
    yield from _ODD
    rng = random.Random(7)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for token in (*added[: _ADDED // 2], *added[_ADDED // 2 :][-_ADDED // 2 :]):
        yield f"{token}{token} {token} a{token}b {token[:-1]} {token[1:]}\n{token}\n"
    every = sorted(tokenizer.get_vocab(with_added_tokens=False).values())
    for _ in range(_RANDOM if every else 0):
        yield tokenizer.decode(rng.choices(every, k=_SOME), skip_special_tokens=False)
        yield "".join(tokenizer.id_to_token(each) or "" for each in rng.choices(every, k=_SOME))
    pieces: list[str] = []
    for code in (*chain(*_CHARACTERS), 0x10FFFF):
        if unicodedata.category(chr(code)) not in ("Cs", "Cn"):
            pieces.append(f"a{chr(code)}{chr(code)}1 {chr(code)}")
        if len(pieces) == _SOME:
            yield "".join(pieces)
            pieces.clear()
    yield "".join(pieces)


def _encode(fast: fastokens.Tokenizer, texts: Sequence[str]) -> list[Encoded]:
    ids, ends = fast.encode_batch_flat(list(texts))
    every, bounds = array("I", ids), array("Q", ends)
    return [Encoded(every[start:end]) for start, end in pairwise(bounds)]


def _in_batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _SOME:
            yield batch
            batch = []
    yield batch
