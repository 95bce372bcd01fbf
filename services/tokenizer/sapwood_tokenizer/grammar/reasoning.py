"""Reasoning before a structured answer: free, and the answer's grammar begins where it ends."""

from __future__ import annotations

from sapwood_common.errors import InvalidArgumentError
from sapwood_text.reasoning_parser.registry import GPT_OSS, reasoning_family
from sapwood_tokenizer.grammar.families import FINAL
from sapwood_tokenizer.grammar.formats import ANYTHING, Format, optional, pattern, repeated, sequence, tag, text

_SPACE = r"\s{0,4}"
_ANALYSIS = tag("<|channel|>analysis<|message|>", ANYTHING, "<|end|><|start|>assistant")


def after_reasoning(
    answer: Format, parser: str, reasoning_open: bool | None, special_names: frozenset[str], *, in_channel: bool
) -> Format:
    """The format of an output that may or must hold reasoning before its answer.

    Args:
        answer: The format of what follows the reasoning.
        parser: A name in ``reasoning_parser.registry``, or "".
        reasoning_open: True: the output begins inside reasoning, which it must close. False: there is no reasoning. None: True
            if that is usual for the family; else there may be reasoning.
        special_names: The special tokens' names.
        in_channel: Whether ``answer`` includes gpt-oss's header of its message.

    Raises:
        InvalidArgumentError: There is no such parser, or its marks are special tokens that no grammar can spell. The field
            is "reasoning_parser".
    """
    if not parser:
        return answer
    if parser == GPT_OSS:
        head = [] if in_channel else [text(FINAL)]
        return sequence(repeated([_ANALYSIS], "", least=False), *head, answer)
    family = reasoning_family(parser)
    for mark in (family.opening, family.closing):
        if mark in special_names and not mark.startswith("<"):
            raise InvalidArgumentError(
                f"structured output is not supported after reasoning that ends with {mark}", field="reasoning_parser"
            )
    is_open = reasoning_open
    if is_open is None and family.starts_open:
        is_open = True
    if is_open is False:
        return answer
    rest = sequence(tag("", ANYTHING, family.closing), pattern(_SPACE))
    if is_open:
        return sequence(rest, answer)
    return sequence(optional(sequence(text(family.opening), rest)), answer)
