"""Fill-in-the-middle: a prompt that asks a model of code for what belongs between two texts.

Each family of models marks the two with tokens of its own, in its own order; a vocabulary has the tokens of one family.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes the prompt: a token, the one text, a token, the other text, a token if there is a third.

    Attributes:
        tokens: Those two or three.
        suffix_first: Whether the text after the gap comes first.
        ends: Further tokens that end the filled-in text, along with those of the form and the end of the text: in the family's
            training data the next file begins there.
    """

    tokens: tuple[str, ...]
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


_FORMS = (
    # Qwen2.5-Coder and later, CodeGemma
    _Form(
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite, Stable Code
    _Form(
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ends=("<fim_pad>", "<filename>", "<reponame>", "<repo_name>", "<file_sep>"),
    ),
    _Form(("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ends=("<fim-pad>",)),  # SantaCoder
    _Form(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),  # DeepSeek-Coder, DeepSeek-V2 and later
    _Form(("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"), suffix_first=True),  # Seed-Coder
    _Form(("[SUFFIX]", "[PREFIX]"), suffix_first=True, ends=("[MIDDLE]",)),  # Codestral
    _Form(("▁<PRE>", "▁<SUF>", "▁<MID>"), ends=("▁<EOT>",)),  # Code Llama
)

_LEAD = "\u263a"
"""A character that no token holds together with the next one."""


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Writes the prompts of a vocabulary that has the tokens.

    Attributes:
        lead: What the text after the gap is encoded behind, so that no space is put before it.
        end_token_ids: Tokens that end what is filled in, along with the model's own end tokens.
    """

    tokens: tuple[int, ...]
    suffix_first: bool
    lead: str
    lead_tokens: int
    end_token_ids: tuple[int, ...]

    def prompt(self, before: array[int], after: array[int]) -> array[int]:
        """The prompt.

        Args:
            before: The tokens of the text before the gap.
            after: Those of ``lead`` and the text after it.
        """
        texts = [before, after[self.lead_tokens :]]
        if self.suffix_first:
            texts.reverse()
        first, second, *last = self.tokens
        return array("I", [first]) + texts[0] + array("I", [second]) + texts[1] + array("I", last)


def find_form(tokenizer: Tokenizer) -> FillInMiddle | None:
    """The form whose tokens the vocabulary has; None if it has those of none."""
    for form in _FORMS:
        tokens = _ids(tokenizer, form.tokens)
        if len(tokens) == len(form.tokens):
            lead = tokenizer.encode(_LEAD, add_special_tokens=False).ids
            spaced = bool(lead) and lead[0] == tokenizer.token_to_id("▁")
            return FillInMiddle(
                tokens,
                form.suffix_first,
                lead=_LEAD if spaced else "",
                lead_tokens=len(lead) if spaced else 0,
                end_token_ids=(*tokens, *_ids(tokenizer, form.ends)),
            )
    return None


def _ids(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[int, ...]:
    found = map(tokenizer.token_to_id, texts)
    return tuple(token for token in found if token is not None)
