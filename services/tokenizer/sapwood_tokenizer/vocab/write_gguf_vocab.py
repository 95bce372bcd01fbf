"""Writes a tokenizer as the metadata of a GGUF file, from which ``gguf_vocab.py`` builds it again.

The tokenizer that is built from the metadata has to give the ids of the original for a set of texts: what such a file cannot say
is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from sapwood_tokenizer.vocab.gguf_vocab import PRE_TOKENIZERS, WHOLE_WORDS, build_tokenizer, normalizer, pre_tokenizer
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
_PADDING = "[PAD{}]"
"""llama.cpp's name of a row of the embedding that no token has."""


def gguf_metadata(loaded: LoadedTokenizer, rows: int) -> dict[str, Any]:
    """The keys and values of a tokenizer, its chat template among them.

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
    _compare(tokenizer, build_tokenizer(found), rows)
    return found


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


def _compare(original: Tokenizer, built: Tokenizer, rows: int) -> None:
    """Raises VocabularyError if the tokenizers encode or decode a text otherwise."""
    for text in _all_texts(original, rows):
        expected, found = original.encode(text).ids, built.encode(text).ids
        if max(expected, default=0) >= rows:
            continue
        if found != expected:
            same = next((at for at, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), 0)
            cut = [
                [each.id_to_token(index) for index in ids[same : same + 4]]
                for each, ids in ((original, expected), (built, found))
            ]
            raise VocabularyError(
                f"a GGUF file cannot say how it cuts {text[:40]!r}: its tokens {cut[0]} would be {cut[1]}"
            )
        if original.decode(expected, skip_special_tokens=False) != built.decode(found, skip_special_tokens=False):
            raise VocabularyError(f"a GGUF file cannot say how it decodes the tokens of {text[:40]!r}")


def _all_texts(tokenizer: Tokenizer, rows: int) -> Iterator[str]:
    """The texts, added tokens between words, and texts of tokens drawn from the vocabulary, alone and several together."""
    yield from ("", *_TEXTS)
    added = [each.content for index, each in tokenizer.get_added_tokens_decoder().items() if index < rows]
    yield from (f"see {each}here, {each} and  {each}\n{each}" for each in added[:_MOST_ADDED])
    draw = random.Random(0)
    drawn = [tokenizer.decode([draw.randrange(rows)], skip_special_tokens=False) for _ in range(_WORDS)]
    yield from drawn
    yield from ("".join(drawn[first : first + 8]) for first in range(0, len(drawn), 8))
