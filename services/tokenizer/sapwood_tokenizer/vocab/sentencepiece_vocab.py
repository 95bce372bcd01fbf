"""Builds a ``tokenizers.Tokenizer`` from a SentencePiece vocabulary: a ``tokenizer.model`` file, or one inside a GGUF file.

Two algorithms exist. BPE (Llama 2, Mistral, Gemma): each token has a score and there are no merges; each step joins the
neighbours whose joined token has the highest score. So the merges are every split of every token into two tokens, ordered by the
joined token's score, descending. Complexity: O(total characters of the vocabulary) look-ups and one sort; Gemma's 262 144 tokens
give 515 000 merges. Unigram (T5, XLM-R): the library implements it.

Sources: SentencePiece's ``bpe_model.cc`` and ``sentencepiece_model.proto`` (Kudo and Richardson 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from sapwood_tokenizer.vocab.special_tokens import (
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    VocabularyError,
    add_special_tokens,
)

_SPACE = "\u2581"  # SentencePiece writes a space as LOWER ONE EIGHTH BLOCK
_UNIGRAM, _BPE = 1, 2
_NEVER = 1e6


@dataclass(frozen=True, slots=True)
class SentencePieceVocabulary:
    """The parts of a vocabulary from which a tokenizer is built.

    Attributes:
        tokens: The token of each id, no two alike.
        scores: The score of each id; tokens of higher score are merged earlier.
        types: The type of each id.
        unknown_id: The token for text that no other token stands for.
        adds_prefix: Whether a text gets a space at its start.
        byte_fallback: Whether characters without a token become bytes.
        unigram: Whether the algorithm is Unigram; else it is BPE.
        charsmap: How characters are normalised first; empty: they are not.
        trims_spaces: Whether spaces at the ends and repeated ones are dropped.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown_id: int | None
    adds_prefix: bool
    byte_fallback: bool = True
    unigram: bool = False
    charsmap: bytes = b""
    trims_spaces: bool = False


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A ``tokenizer.model`` file: a tokenizer and its control tokens, if it has them."""

    tokenizer: Tokenizer
    bos: str | None
    eos: str | None
    unknown: str | None


def load_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads a ``tokenizer.model``.

    Raises:
        OSError: The file cannot be read.
        VocabularyError: It is not such a file, or its kind is not supported.
    """
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise VocabularyError("it is neither a SentencePiece model nor a tiktoken file") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if not model.pieces:
        raise VocabularyError("it is a SentencePiece model without tokens")
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise VocabularyError("its model is neither Unigram nor BPE")
    if trainer.treat_whitespace_as_suffix:
        raise VocabularyError("it puts white space after words, which is not supported")
    vocabulary = SentencePieceVocabulary(
        tokens=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        unknown_id=next((index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None),
        adds_prefix=normalizer.add_dummy_prefix,
        byte_fallback=trainer.byte_fallback,
        unigram=trainer.model_type == _UNIGRAM,
        charsmap=normalizer.precompiled_charsmap,
        trims_spaces=normalizer.remove_extra_whitespaces,
    )
    try:
        tokenizer = build_sentencepiece(vocabulary)
    except Exception as error:  # the library raises plain Exception
        raise VocabularyError(str(error)) from error
    add_special_tokens(tokenizer, vocabulary.tokens, vocabulary.types)
    bos, eos, unknown = (
        model.pieces[index].piece if 0 <= index < len(model.pieces) else None
        for index in (trainer.bos_id, trainer.eos_id, trainer.unk_id)
    )
    return SentencePieceModel(tokenizer, bos, eos, unknown)


def build_sentencepiece(vocabulary: SentencePieceVocabulary) -> Tokenizer:
    """The tokenizer, without added tokens and post-processor."""
    tokenizer = Tokenizer(_unigram(vocabulary) if vocabulary.unigram else _bpe(vocabulary))
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.trims_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.adds_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    to_blocks = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([*steps, to_blocks]) if steps else to_blocks
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if vocabulary.adds_prefix else back)
    return tokenizer


def rebuild_merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a BPE vocabulary, first to be applied first.

    Args:
        tokens: The token of each id.
        scores: The score of each id; tokens of higher score are merged earlier, ties by id, splits of one token by place.
        types: The type of each id; only normal tokens take part in merges.
    """
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, UNUSED)}
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


def _bpe(vocabulary: SentencePieceVocabulary) -> models.BPE:
    unknown = vocabulary.unknown_id
    return models.BPE(
        vocab={token: index for index, token in enumerate(vocabulary.tokens)},
        merges=rebuild_merges(vocabulary.tokens, vocabulary.scores, vocabulary.types),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=vocabulary.byte_fallback,
    )


def _unigram(vocabulary: SentencePieceVocabulary) -> models.Unigram:
    # The library matches every token in the text, even control tokens; this score makes those never the best choice.
    never = min(vocabulary.scores) - _NEVER
    scored = zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
    return models.Unigram(
        vocab=[(token, score if kind in (NORMAL, USER_DEFINED) else never) for token, score, kind in scored],
        unk_id=vocabulary.unknown_id,
        byte_fallback=vocabulary.byte_fallback,
    )
