"""Writes a tokenizer as the metadata of a GGUF file, from which ``gguf_vocab.py`` builds it again.

The tokenizer that is built from the vocabulary in the metadata is compared with the original by a set of texts. Where it differs
in some, the metadata hold the original's ``tokenizer.json``, too, which Sapwood reads. Where it differs in many, it is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from sapwood_tokenizer.vocab.gguf_vocab import (
    HF_JSON,
    PRE_TOKENIZERS,
    WHOLE_WORDS,
    build_tokenizer,
    normalizer,
    pre_tokenizer,
)
from sapwood_tokenizer.vocab.loader import LoadedTokenizer
from sapwood_tokenizer.vocab.special_tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    VocabularyError,
)

_TEXTS = (
    "The capital of France isn't Paris, IT'S 12345 km away: 3.14 we'LL see 1 22 333 4444",
    "def f(x):\n\treturn {'a': [1, 2, 3]}  # comment\n\n\n   if x != y:\r\n\r\n        pass\t\t\n",
    "東京は日本の首都です。汉字和かなと한글 你好abc １２３ ٣٤٥",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumbs! !?...  -- _x_ <a href='b'>/c\\",
    "مرحبا بالعالم שלום עולם नमस्ते Ωμέγα ЯБЛОКО яблоко",
    "  leading and trailing  ",
    " one",
    "\u200b\u00a0\u2003odd spaces \u2028 \x00\x01\x7f",
    "Ünïcödé ñ ß ﬁ ½ ① e\u0301 CamelCaseWORDSand snake_case Ǆungla aB",
)
"""Texts in which the known pre-tokenizers differ."""
_SPACE = "\u2581"
_WORDS = 4096
"""Tokens of the vocabulary whose texts are encoded again."""
_MOST_ADDED = 256
_MOST_DIFFERENT = 0.05
"""Share of the texts without added tokens that may differ."""
_PADDING = "[PAD{}]"
"""llama.cpp's name of a row of the embedding that no token has."""


class GgufVocabulary(NamedTuple):
    """A tokenizer's metadata.

    Attributes:
        metadata: Keys and values, the chat template's among them.
        difference: How readers that do not read a ``tokenizer.json`` in the file cut some texts otherwise; empty: they do not.
    """

    metadata: dict[str, Any]
    difference: str


def gguf_vocabulary(loaded: LoadedTokenizer, rows: int) -> GgufVocabulary:
    """The metadata of a tokenizer.

    Args:
        loaded: The tokenizer with its files' settings.
        rows: Rows of the model's embedding: tokens beyond them are left out, rows without a token get one.

    Raises:
        VocabularyError: A GGUF file cannot say how it cuts texts; the message says why.
    """
    tokenizer = loaded.tokenizer
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    if model.get("type") != "BPE":
        raise VocabularyError(f"its model is {model.get('type')}; GGUF files that can be written have BPE")
    unknown = None if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])
    found: dict[str, Any] = {
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(index) or _PADDING.format(index) for index in range(rows)]
    }
    types = _types(tokenizer, rows, unknown, bytes_apart=bool(model.get("byte_fallback")))
    found |= {"tokenizer.ggml.token_type": types} | _named_tokens(loaded, rows, unknown)
    if loaded.chat_template is not None:
        found["tokenizer.chat_template"] = loaded.chat_template
    tokens = frozenset(found["tokenizer.ggml.tokens"])
    pairs = (tuple(each.split(" ", 1)) if isinstance(each, str) else tuple(each) for each in model["merges"])
    merges = [pair for pair in pairs if tokens.issuperset((*pair, "".join(pair)))]
    if (state.get("decoder") or {}).get("type") == "ByteLevel":
        pre = _pre(tokenizer, bool(model.get("ignore_merges")))
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
        found["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    else:
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        found["tokenizer.ggml.scores"] = _scores(tokenizer, rows, merges)
        found["tokenizer.ggml.add_space_prefix"] = _adds_prefix(tokenizer)
    built = build_tokenizer(found)
    plain = (_difference(tokenizer, built, text, rows) for text in _plain_texts(tokenizer, rows))
    differing = list(filter(None, plain))
    if len(differing) > _MOST_DIFFERENT * _WORDS:
        raise VocabularyError(f"a GGUF file cannot say how it cuts {differing[0]}, and {len(differing) - 1} texts more")
    among = (_difference(tokenizer, built, text, rows) for text in _texts_with_added(tokenizer, rows))
    difference = next(filter(None, (*differing, *among)), "")
    return GgufVocabulary(found | ({HF_JSON: tokenizer.to_str()} if difference else {}), difference)


def _types(tokenizer: Tokenizer, rows: int, unknown: int | None, *, bytes_apart: bool) -> list[int]:
    added = tokenizer.get_added_tokens_decoder()
    types: list[int] = []
    for index in range(rows):
        text = tokenizer.id_to_token(index)
        if index in added:
            types.append(CONTROL if added[index].special else USER_DEFINED)
        elif text is None:
            types.append(UNUSED)
        elif index == unknown:
            types.append(UNKNOWN)
        else:
            is_byte = bytes_apart and len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">")
            types.append(BYTE if is_byte else NORMAL)
    return types


def _named_tokens(loaded: LoadedTokenizer, rows: int, unknown: int | None) -> dict[str, Any]:
    """The ids of tokens that have a meaning, and which of them a text gets at its ends."""
    tokenizer = loaded.tokenizer
    bos, eos = loaded.bos_token_id, next(iter(loaded.eos_token_ids), None)
    around = tokenizer.encode("", add_special_tokens=True).ids
    if bos is None and around and around[0] != eos:
        bos = around[0]
    known = {(): (False, False), (bos,): (True, False), (eos,): (False, True), (bos, eos): (True, True)}
    if tuple(around) not in known:
        texts = [tokenizer.id_to_token(index) for index in around]
        raise VocabularyError(f"it puts {texts} around a text; a GGUF file can say BOS before and EOS after it")
    opens, closes = known[tuple(around)]
    padding = loaded.special_tokens.get("pad_token")
    if unknown is None and (text := loaded.special_tokens.get("unk_token")) is not None:
        unknown = tokenizer.token_to_id(text)
    ids = {
        "bos": bos,
        "eos": eos,
        "unknown": unknown,
        "padding": None if padding is None else tokenizer.token_to_id(padding),
    }
    found: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None and index < rows
    }
    return found | {"tokenizer.ggml.add_bos_token": opens, "tokenizer.ggml.add_eos_token": closes}


def _pre(tokenizer: Tokenizer, whole_words: bool) -> str:
    """The name of the pre-tokenizer that cuts the texts as this one does."""
    words = list(map(_Cut(tokenizer.normalizer, tokenizer.pre_tokenizer), _TEXTS))
    for name in PRE_TOKENIZERS:
        cut = _Cut(normalizer(name), pre_tokenizer(name))
        if (name in WHOLE_WORDS) == whole_words and all(
            cut(text) == each for text, each in zip(_TEXTS, words, strict=True)
        ):
            return name
    raise VocabularyError(
        f"none of the pre-tokenizers of GGUF files cuts texts as it does ({', '.join(PRE_TOKENIZERS)})"
    )


class _Cut:
    """Cuts a text into words."""

    def __init__(self, change: Any, cut: Any) -> None:
        self._change, self._cut = change, cut

    def __call__(self, text: str) -> list[str]:
        changed = text if self._change is None else self._change.normalize_str(text)
        return [changed] if self._cut is None else [word for word, _ in self._cut.pre_tokenize_str(changed)]


def _scores(tokenizer: Tokenizer, rows: int, merges: Sequence[tuple[str, ...]]) -> list[float]:
    """The earlier merges make a token, the higher its score; tokens that none makes have the lowest."""
    first: dict[str, int] = {}
    for merge in merges:
        first.setdefault("".join(merge), len(first))
    return [float(-first.get(tokenizer.id_to_token(index) or "", len(first))) for index in range(rows)]


def _adds_prefix(tokenizer: Tokenizer) -> bool:
    return _Cut(tokenizer.normalizer, tokenizer.pre_tokenizer)("a")[0].startswith(_SPACE)


def _difference(original: Tokenizer, built: Tokenizer, text: str, rows: int) -> str:
    """How the tokenizers encode or decode a text otherwise; empty: they do not."""
    expected, found = original.encode(text).ids, built.encode(text).ids
    if max(expected, default=0) >= rows:
        return ""
    if found != expected:
        same = next((at for at, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), 0)
        cut, otherwise = (
            [each.id_to_token(index) for index in ids[same : same + 4]]
            for each, ids in ((original, expected), (built, found))
        )
        return f"{text[:40]!r} (its tokens {cut} would be {otherwise})"
    if original.decode(expected, skip_special_tokens=False) != built.decode(found, skip_special_tokens=False):
        return f"{text[:40]!r} (its tokens would be decoded otherwise)"
    return ""


def _plain_texts(tokenizer: Tokenizer, rows: int) -> Iterator[str]:
    """The texts, and texts of tokens drawn from the vocabulary, alone and several together."""
    yield from ("", *_TEXTS)
    draw = random.Random(0)
    drawn = [tokenizer.decode([draw.randrange(rows)], skip_special_tokens=False) for _ in range(_WORDS)]
    yield from drawn
    yield from ("".join(drawn[first : first + 8]) for first in range(0, len(drawn), 8))


def _texts_with_added(tokenizer: Tokenizer, rows: int) -> Iterator[str]:
    """Added tokens between words."""
    added = [each.content for index, each in tokenizer.get_added_tokens_decoder().items() if index < rows]
    yield from (f"see {each}here, {each} and  {each}\n{each}" for each in added[:_MOST_ADDED])
