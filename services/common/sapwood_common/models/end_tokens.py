"""Tokens that end an answer, as a model's files name them. Worker and tokenizer read them alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_ALWAYS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a turn or a text in every vocabulary that has them."""
_IN_TEMPLATE = (
    "<|end|>", "<|eot|>", "<turn|>", "<|end_of_turn|>", "[|endofturn|]", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>", "<|eom|>", "[e~[", "</s>",
)  # fmt: skip
"""Tokens that end a turn where the chat template has them."""
_HARMONY = "<|return|>"
"""A vocabulary with this token has messages within an answer; each ends with ``<|end|>``."""


def end_ids(found: Any, vocab_size: int, where: str) -> list[int]:
    """The ids of a setting that names one or several; what is no token of the vocabulary is dropped with a line in the log.

    Args:
        found: The value in the file: a number, a list of numbers, or nothing.
        vocab_size: Every id is below it.
        where: The file and the setting's name.
    """
    given = found if isinstance(found, list) else [] if found is None else [found]
    ids = []
    for each in given:
        if isinstance(each, int) and not isinstance(each, bool) and 0 <= each < vocab_size:
            ids.append(each)
        else:
            logger.warning("%s: %.60r is no token of the %d in the vocabulary; it is ignored", where, each, vocab_size)
    return ids


def turn_ends(ids: Mapping[str, int], template: str | None) -> list[int]:
    """The tokens that end a turn, by the text of special and other added tokens.

    Args:
        ids: The added tokens.
        template: The chat template; None: there is none.
    """
    named = [name for name in _IN_TEMPLATE if template and name in template]
    if _HARMONY in ids and "<|end|>" in named:
        named.remove("<|end|>")
    return [ids[name] for name in (*_ALWAYS, *named) if name in ids]
