"""The tool-call families by name, and which one a chat template is of; packages add theirs as entry points of ``GROUP``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_common.plugins import find_part, part_names
from sapwood_text.tool_parser.base import ToolFamily
from sapwood_text.tool_parser.deepseek import DEEPSEEK
from sapwood_text.tool_parser.gemma4 import GEMMA4
from sapwood_text.tool_parser.gpt_oss import GPT_OSS
from sapwood_text.tool_parser.hermes import HERMES
from sapwood_text.tool_parser.json_list import COHERE, GRANITE
from sapwood_text.tool_parser.kimi_k2 import KIMI_K2
from sapwood_text.tool_parser.llama3_json import LLAMA3_JSON
from sapwood_text.tool_parser.mistral import MISTRAL
from sapwood_text.tool_parser.pythonic import PYTHONIC
from sapwood_text.tool_parser.tagged_families import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_CODER

GROUP = "sapwood.tool_parsers"

FAMILIES: Mapping[str, ToolFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            COHERE,
            DEEPSEEK,
            DEEPSEEK_V32,
            GEMMA4,
            GLM45,
            GPT_OSS,
            GRANITE,
            HERMES,
            KIMI_K2,
            LLAMA3_JSON,
            MINIMAX_M2,
            MISTRAL,
            PYTHONIC,
            QWEN3_CODER,
        )
    }
)
NAMES = tuple(sorted(FAMILIES))

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (GPT_OSS.name, ("<|channel|>", "<|start|>")),
    (KIMI_K2.name, ("<|tool_calls_section_begin|>",)),
    (KIMI_K2.name, ("<|im_system|>tool_declare",)),
    (DEEPSEEK_V32.name, ("｜DSML｜",)),
    (DEEPSEEK.name, ("<｜tool▁calls▁begin｜>",)),
    (MINIMAX_M2.name, ("<minimax:tool_call>",)),
    (GEMMA4.name, ("<|tool_call>call:",)),
    (MISTRAL.name, ("[TOOL_CALLS]",)),
    (COHERE.name, ("<|START_ACTION|>",)),
    (GRANITE.name, ("<|tool_call|>",)),
    (GLM45.name, ("<tool_call>", "<arg_key>")),
    (QWEN3_CODER.name, ("<tool_call>", "<function=")),
    (HERMES.name, ("<tool_call>",)),
    (PYTHONIC.name, ("<|python_start|>",)),
    (LLAMA3_JSON.name, ("<|start_header_id|>", '"parameters"')),
)
"""A family and the strings that only its templates hold, most telling first; docs/parsers.md lists them."""


def names() -> tuple[str, ...]:
    """The names of all families, those of other packages included."""
    return part_names(GROUP, FAMILIES)


@lru_cache(maxsize=64)
def tool_family(name: str) -> ToolFamily:
    """The family called ``name``.

    Raises:
        InvalidArgumentError: There is none. The field is "tool_parser".
    """
    try:
        return find_part(GROUP, name, FAMILIES)
    except ConfigError as error:
        raise InvalidArgumentError(f"no tool parser: {error}", field="tool_parser") from None


def detect_tool_parser(template: str) -> str:
    """The name of the family whose chat template this is; "" if it is none of them, or knows neither tools nor calls.

    DeepSeek's of V3, R1 and V3.1 write calls, but leave it to the system prompt to tell of the tools.
    """
    if "tools" not in template and "tool_calls" not in template:
        return ""
    return next((name for name, signs in SIGNS if all(sign in template for sign in signs)), "")
