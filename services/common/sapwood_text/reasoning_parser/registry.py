"""The reasoning families by name, and which one a chat template is of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sapwood_common.errors import InvalidArgumentError
from sapwood_text.reasoning_parser import families
from sapwood_text.reasoning_parser.base import ReasoningFamily

GPT_OSS = "gpt_oss"
"""The family whose parser, ``tool_parser.gpt_oss``, reads reasoning and calls together."""
_GPT_OSS_SIGNS = ("<|channel|>", "<|start|>")

FAMILIES: Mapping[str, ReasoningFamily] = MappingProxyType({family.name: family for family in families.FAMILIES})
NAMES = tuple(sorted([*FAMILIES, GPT_OSS]))


def reasoning_family(name: str) -> ReasoningFamily:
    """The family called ``name``, which is not gpt_oss.

    Raises:
        InvalidArgumentError: There is none. The field is "reasoning_parser".
    """
    if name not in FAMILIES:
        raise InvalidArgumentError(
            f"no reasoning parser {name!r}; there are {', '.join(NAMES)}", field="reasoning_parser"
        )
    return FAMILIES[name]


def ends_in_reasoning(prompt: str, continued: str = "") -> bool | None:
    """Whether a prompt ends inside reasoning, so that the model's output begins there; None if it does not say.

    Args:
        prompt: The prompt; it ends inside if its last word is an opening tag, and outside if that is a closing tag.
        continued: The message that the prompt ends with, if the model is to continue with it: its last tag decides.
    """
    text = prompt.rstrip()
    if any(text.endswith(family.opening) for family in FAMILIES.values()):
        return True
    if any(text.endswith(family.closing) for family in FAMILIES.values()):
        return False
    opened = max(continued.rfind(family.opening) for family in FAMILIES.values())
    closed = max(continued.rfind(family.closing) for family in FAMILIES.values())
    return None if opened == closed else opened > closed


def detect_reasoning_parser(template: str) -> str:
    """The name of the family whose chat template this is; "" if it is none of them, or does not reason."""
    if all(sign in template for sign in _GPT_OSS_SIGNS):
        return GPT_OSS
    return next((name for name, family in FAMILIES.items() if all(sign in template for sign in family.signs)), "")
