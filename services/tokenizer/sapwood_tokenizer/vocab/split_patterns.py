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
_EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00-\ufb06\ufb13-\ufb17Ａ-Ｚａ-ｚ"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The letters that DeepSeek's first tokenizer takes together."""
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
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        _EAST_ASIAN,
        r"\p{N}+",
    ),
    "seed-coder": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}",),
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
