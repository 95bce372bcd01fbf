"""Builds a ``tokenizers.Tokenizer`` from the vocabulary inside a GGUF file.

Two kinds of vocabulary exist in generative models' files:

- ``tokenizer.ggml.model`` = ``llama``: a SentencePiece BPE vocabulary (Gemma, Llama 2, Mistral): tokens with scores.
- ``gpt2``: byte-level BPE (Llama 3, Qwen). The file holds the merges and the name of the pre-tokenizer.

The key names are those of the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from sapwood_tokenizer.vocab.sentencepiece_vocab import SentencePieceVocabulary, build_sentencepiece
from sapwood_tokenizer.vocab.special_tokens import NORMAL, UNKNOWN, VocabularyError, add_special_tokens, put_around
from sapwood_tokenizer.vocab.split_patterns import PATTERNS, split_as_gpt2, split_at

HF_JSON = "tokenizer.huggingface.json"
"""The key of a whole ``tokenizer.json``, which few files have."""
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
"""Pre-tokenizers that cut digits from each other before GPT-2's expression cuts the rest: Granite 3's among them."""
PRE_TOKENIZERS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "default", "olmo", *_DIGITS_APART), None),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), "cl100k"
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    **dict.fromkeys(("gpt-4o", "llama4"), "o200k"),
    "tekken": "tekken",
    "kimi-k2": "kimi",
    "deepseek-v3": "deepseek",
    "deepseek-llm": "deepseek-llm",
    "deepseek-coder": "deepseek-coder",
    "seed-coder": "seed-coder",
}
"""llama.cpp's name of the pre-tokenizer -> the family of expressions; None is GPT-2's own. Files get the first name that fits."""
WHOLE_WORDS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "gpt-4o", "llama4", "tekken", "kimi-k2"}
)
"""Pre-tokenizers of vocabularies that take a word that is a token whole, whatever the merges say."""
_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "llama4", "tekken", "deepseek-v3"})
"""Pre-tokenizers of vocabularies that begin a text with BOS unless the file says otherwise."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    Args:
        metadata: ``GgufFile.metadata``.

    Raises:
        VocabularyError: A key is missing or its kind of vocabulary is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise VocabularyError("tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length")
    names = _distinct(tokens)
    if kind == "llama":
        tokenizer = _sentencepiece(metadata, names, types)
        adds_bos = True
    elif kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        tokenizer = _byte_level(metadata, names, pre)
        adds_bos = pre in _BOS
    else:
        raise VocabularyError(f"tokenizer.ggml.model is {kind!r}; 'llama' and 'gpt2' are supported")
    add_special_tokens(tokenizer, names, types)
    opening, closing = (
        _named(metadata, names, name) if metadata.get(f"tokenizer.ggml.add_{name}_token", usual) else None
        for name, usual in (("bos", adds_bos), ("eos", False))
    )
    put_around(tokenizer, opening, closing)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = _required(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise VocabularyError("tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = next((index for index, kind in enumerate(types) if kind == UNKNOWN), None)
    return build_sentencepiece(
        SentencePieceVocabulary(
            tokens=tokens,
            scores=scores,
            types=types,
            unknown_id=unknown,
            adds_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
        )
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], pre: str) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise VocabularyError(f"tokenizer.ggml.pre is {pre!r}; supported are: {', '.join(sorted(PRE_TOKENIZERS))}")
    merges: list[tuple[str, str]] = []
    for merge in _required(metadata, "tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator:
            raise VocabularyError(f"tokenizer.ggml.merges holds {merge!r}, which is no pair")
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in WHOLE_WORDS,
        )
    )
    tokenizer.normalizer = normalizer(pre)
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """What cuts a text into words, by its name in ``PRE_TOKENIZERS``."""
    family = PRE_TOKENIZERS[pre]
    return split_as_gpt2(digits_apart=pre in _DIGITS_APART) if family is None else split_at(PATTERNS[family])


def normalizer(pre: str) -> normalizers.Normalizer | None:
    """What changes a text before it is cut; None: nothing."""
    return normalizers.NFC() if PRE_TOKENIZERS[pre] == "qwen2" else None


def _named(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if index is not None and index < len(tokens) else None


def _distinct(tokens: Sequence[str]) -> Sequence[str]:
    """The tokens with each duplicate or invalid Unicode text renamed to a unique one, so that ids stay as they are."""
    if len(set(tokens)) == len(tokens) and all(tokens) and _is_unicode("".join(tokens)):
        return tokens
    seen: set[str] = set()
    distinct: list[str] = []
    for index, token in enumerate(tokens):
        if token in seen or not token or not _is_unicode(token):
            token = f"<|sapwood_unnamed_{index}|>"
        seen.add(token)
        distinct.append(token)
    return distinct


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in set(text))


def _required(metadata: Mapping[str, Any], key: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise VocabularyError(f"{key} is missing")
    return value
