"""Builds a ``tokenizers.Tokenizer`` from a vocabulary of bytes with ranks: tiktoken files and Mistral's ``tekken.json``.

Such a vocabulary has no merges: each step joins the neighbours whose joined bytes have the lowest rank. So the merges are every
split of every token into two tokens, in the order of the joined token's rank. Complexity: O(total bytes of the vocabulary)
look-ups; 200 000 tokens give 450 000 merges.

Sources: https://github.com/openai/tiktoken (``_educational.py``); Mistral's tekken as in
https://github.com/mistralai/mistral-common.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from sapwood_common.grammar.vocabulary import printable_bytes
from sapwood_tokenizer.vocab.special_tokens import VocabularyError
from sapwood_tokenizer.vocab.split_patterns import PATTERNS, split_as_gpt2, split_at


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    patterns: tuple[str, ...] | None
    """The expressions that cut words; None: GPT-2's."""
    special: Mapping[str, int]
    bos: str | None = None


def _numbered(first: int, *names: str) -> dict[str, int]:
    return {name: first + index for index, name in enumerate(names)}


_LLAMA3_SPECIAL = _numbered(
    128000,
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(3, 248)),
)
_FILL_IN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

# A tiktoken file holds neither the expression nor the special tokens; its number of tokens tells the family.
_FAMILIES: dict[int, _Family] = {
    50256: _Family("gpt2", None, {"<|endoftext|>": 50256}),
    50280: _Family("p50k", None, {"<|endoftext|>": 50256}),
    100256: _Family(
        "cl100k", PATTERNS["cl100k"], {**_numbered(100257, "<|endoftext|>", *_FILL_IN), "<|endofprompt|>": 100276}
    ),
    128000: _Family("llama3", PATTERNS["cl100k"], _LLAMA3_SPECIAL, bos="<|begin_of_text|>"),
    151643: _Family(
        "qwen",
        PATTERNS["qwen2"],
        _numbered(
            151643,
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *(f"<|extra_{index}|>" for index in range(205)),
        ),
    ),
    163584: _Family("kimi", PATTERNS["kimi"], {}),
    199998: _Family("o200k", PATTERNS["o200k"], {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins like one of tiktoken's: a token in base64, a space, its rank.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(4096).split()
    return len(line) == 2 and line[1].isdigit() and _decoded(line[0]) is not None


def load_tiktoken(path: Path, special: Mapping[str, int]) -> tuple[Tokenizer, str | None]:
    """The tokenizer of a tiktoken file, and its beginning-of-text token, if texts get one.

    Args:
        path: The file.
        special: Special tokens from other files, with their ids; if empty, those of the vocabulary's family are used.

    Raises:
        OSError: The file cannot be read.
        VocabularyError: It is not such a file, or of an unknown family.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b" ")
        decoded = _decoded(token)
        if not decoded or not rank.strip().isdigit():
            raise VocabularyError(f"line {number} is no token in base64 and a rank")
        ranks[decoded] = int(rank)
    family = _FAMILIES.get(len(ranks))
    if family is None:
        known = ", ".join(f"{family.name} with {count}" for count, family in _FAMILIES.items())
        raise VocabularyError(
            f"it has {len(ranks)} tokens, so how it splits words is not known; known are {known}. "
            "Convert it to a tokenizer.json"
        )
    tokenizer = _build(ranks, 0, special or family.special, family.patterns)
    return tokenizer, family.bos if family.bos and tokenizer.token_to_id(family.bos) is not None else None


def load_tekken(path: Path) -> Tokenizer:
    """The tokenizer of a ``tekken.json``. Its special tokens have the first ids.

    Raises:
        OSError: The file cannot be read.
        VocabularyError: It is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = content["config"]
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        words = content["vocab"][: size - count]
        ranks = {base64.b64decode(word["token_bytes"]): int(word["rank"]) for word in words}
        special = {str(token["token_str"]): int(token["rank"]) for token in content.get("special_tokens") or ()}
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise VocabularyError(f"not a tekken vocabulary: {error!r}") from error
    named = special or _numbered(0, *_TEKKEN_SPECIAL)
    taken = set(named.values())
    named |= {f"<SPECIAL_{index}>": index for index in range(count) if index not in taken}
    return _build(ranks, count, named, (pattern,))


# Special tokens of vocabularies before version 7, which do not name them.
_TEKKEN_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)


def rebuild_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges of a ranked vocabulary, first to be applied first."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        found = [split for split in splits if split[0] in ranks and split[1] in ranks]
        found.sort(key=lambda split: (ranks[split[0]], ranks[split[1]]))
        merges += found
    return merges


def _build(
    ranks: Mapping[bytes, int], offset: int, special: Mapping[str, int], patterns: tuple[str, ...] | None
) -> Tokenizer:
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise VocabularyError("not every byte is a token")
    characters = printable_bytes()

    def printable(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {printable(token): rank + offset for token, rank in ranks.items()}
    taken = set(vocabulary.values())
    wrong = next((name for name, index in special.items() if index in taken or name in vocabulary), None)
    if wrong is not None:
        raise VocabularyError(f"the special token {wrong!r} has the name or id of another token")
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={**vocabulary, **special},
                merges=[(printable(left), printable(right)) for left, right in rebuild_merges(ranks)],
                ignore_merges=True,  # a word that is a token is taken whole
            )
        )
        tokenizer.pre_tokenizer = split_at(patterns) if patterns is not None else split_as_gpt2()
    except Exception as error:  # the library raises plain Exception
        raise VocabularyError(str(error)) from error
    tokenizer.decoder = decoders.ByteLevel()
    in_order = sorted(special, key=special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in in_order])
    return tokenizer


def _decoded(token: bytes) -> bytes | None:
    try:
        return base64.b64decode(token, validate=True)
    except binascii.Error:
        return None


def special_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """The special tokens that a ``tokenizer_config.json`` lists, with their ids."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return {}
    return {
        token["content"]: int(index)
        for index, token in listed.items()
        if isinstance(token, dict) and isinstance(token.get("content"), str) and index.isdigit()
    }
