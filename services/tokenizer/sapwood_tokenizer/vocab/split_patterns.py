"""How the published byte-level tokenizers cut a text into words, by family.

The expressions are those of the families' published ``tokenizer.json`` (tiktoken's spell the same with possessive quantifiers).
A family with several cuts the text by the first, then the rest by the next.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, suffix: str) -> str:
    """The expression of a word: upper-case letters, then lower-case ones."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{suffix}|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{suffix}"


_O200K_REST = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_CHINESE = r"&&[^\p{Han}]"

PATTERNS: dict[str, tuple[str, ...]] = {
    "cl100k": (_CL100K,),
    "qwen2": (_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "o200k": (_cased(_UPPER, _LOWER, f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _O200K_REST,),
    "tekken": (_cased(_UPPER, _LOWER, "") + r"|\p{N}" + _O200K_REST,),
    "kimi": (
        r"[\p{Han}]+|"
        + _cased(_UPPER + _CHINESE, _LOWER + _CHINESE, f"{_CONTRACTIONS}?")
        + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    ),
    "deepseek": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
        + _REST,
    ),
}
"""Expressions, in Oniguruma's syntax."""


def split_at(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Cuts at the matches of each expression in turn, then writes bytes as GPT-2 does.

    Raises:
        ValueError: Not an expression.
    """
    steps = []
    for pattern in patterns:
        try:
            steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{pattern!r}: {error}") from error
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def split_as_gpt2(*, digits_apart: bool = False) -> pre_tokenizers.PreTokenizer:
    """Cuts by GPT-2's own expression, which the library knows; first between digits if asked for."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut]) if digits_apart else cut
