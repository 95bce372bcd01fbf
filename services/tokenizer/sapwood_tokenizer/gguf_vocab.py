"""Builds a ``tokenizers.Tokenizer`` from the vocabulary inside a GGUF file.

Two kinds of vocabulary exist in generative models' files:

- ``tokenizer.ggml.model`` = ``llama``: a SentencePiece BPE vocabulary (Gemma, Llama 2, Mistral). The file holds a score for
  each token and no merges. SentencePiece merges, at each step, the neighbours whose joined token has the highest score, so
  the merges are rebuilt as every split of every token into two tokens, ordered by the joined token's score, descending. Cost:
  O(total characters of the vocabulary) dictionary look-ups plus one sort; Gemma's 262 144 tokens give 515 000 merges.
- ``gpt2``: byte-level BPE (Llama 3, Qwen). The file holds the merges and the name of the pre-tokenizer.

Sources: SentencePiece's ``bpe_model.cc`` (Kudo and Richardson 2018); the key names are those of the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space as LOWER ONE EIGHTH BLOCK

# What llama.cpp's converter calls the pre-tokenizer -> the expression of the model family's published tokenizer.
_LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_GPT2_NAMES = frozenset({"default", "gpt-2"})


class VocabularyError(Exception):
    """The metadata describe no vocabulary that can be built; the message says why."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    Args:
        metadata: ``GgufFile.metadata``.

    Raises:
        VocabularyError: A key is missing or its kind of vocabulary is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise VocabularyError("tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length")
    names = _distinct(tokens)
    if kind == "llama":
        tokenizer = _sentencepiece(metadata, names, types)
        adds_bos = True
    elif kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        tokenizer = _byte_level(metadata, names, pre)
        adds_bos = pre in _LLAMA3_NAMES
    else:
        raise VocabularyError(f"tokenizer.ggml.model is {kind!r}; 'llama' and 'gpt2' are supported")
    tokenizer.add_special_tokens(_added(names, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(names, types, _USER_DEFINED, special=False))
    before = ["bos"] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    after = ["eos"] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    _add_post_processor(tokenizer, metadata, names, before, after)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = _required(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise VocabularyError("tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = next((index for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=rebuild_merges(tokens, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_blocks = normalizers.Replace(" ", _SPACE)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_blocks]) if prefixed else to_blocks
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def rebuild_merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary, first to be applied first.

    Args:
        tokens: The token of each id.
        scores: Its score; the higher, the earlier it is merged. Ties go by id, splits of one token by their place.
        types: Its type number; only normal tokens take part in merges.
    """
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _UNUSED)}
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(tokens)), key=lambda index: -scores[index]):  # stable: ties by id
        token = tokens[index]
        if token not in mergeable:
            continue
        for split in range(1, len(token)):
            left = token[:split]
            if left in mergeable:
                right = token[split:]
                if right in mergeable:
                    merges.append((left, right))
    return merges


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], pre: str) -> Tokenizer:
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
            ignore_merges=pre in _LLAMA3_NAMES,  # Llama 3 takes a word that is a token whole
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "qwen2":
        pattern = _QWEN2_PATTERN
    elif pre in _LLAMA3_NAMES:
        pattern = _LLAMA3_PATTERN
    else:
        names = ", ".join(sorted({"qwen2", *_GPT2_NAMES, *_LLAMA3_NAMES}))
        raise VocabularyError(f"tokenizer.ggml.pre is {pre!r}; supported are: {names}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_post_processor(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], before: list[str], after: list[str]
) -> None:
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in (*before, *after)}
    known = {name: index for name, index in ids.items() if index is not None and index < len(tokens)}
    special = {tokens[index]: index for index in known.values()}
    if not special:
        return
    opening = [tokens[known[name]] for name in before if name in known]
    closing = [tokens[known[name]] for name in after if name in known]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*opening, "$A", *closing],
        pair=[*opening, "$A", *closing, *(f"{token}:1" for token in opening), "$B:1", *(f"{t}:1" for t in closing)],
        special_tokens=list(special.items()),
    )


def _added(tokens: Sequence[str], types: Sequence[int], kind: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, of_kind in zip(tokens, types, strict=True)
        if of_kind == kind and token
    ]


def _distinct(tokens: Sequence[str]) -> Sequence[str]:
    """The tokens, with a name of its own for each that is a duplicate or no Unicode text, so that ids stay as they are."""
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
