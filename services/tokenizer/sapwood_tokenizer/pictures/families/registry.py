"""The families of models that take pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sapwood_tokenizer.pictures.families.family import PictureFamilyEntry
from sapwood_tokenizer.pictures.families.gemma3 import GEMMA3
from sapwood_tokenizer.pictures.families.idefics3 import IDEFICS3
from sapwood_tokenizer.pictures.families.internvl import INTERNVL
from sapwood_tokenizer.pictures.families.llama4 import LLAMA4
from sapwood_tokenizer.pictures.families.llava import LLAVA
from sapwood_tokenizer.pictures.families.llava_next import LLAVA_NEXT
from sapwood_tokenizer.pictures.families.pixtral import PIXTRAL
from sapwood_tokenizer.pictures.families.qwen_vl import QWEN_VL

_FAMILIES = (GEMMA3, IDEFICS3, INTERNVL, LLAMA4, LLAVA, LLAVA_NEXT, PIXTRAL, QWEN_VL)


def picture_family(config: Mapping[str, Any]) -> PictureFamilyEntry | None:
    """The family of a model, by ``config.json``; None: pictures for it are not prepared."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return next((family for family in _FAMILIES if name in family.architectures), None)
