"""The names of architectures that families may have, found without importing the families, which load torch."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

_GROUP = "sapwood.model_families"
_NAME = re.compile(r'"([A-Z]\w+)"')
_FAMILY = re.compile(r"^\w+ = ModelFamily\((.*?)^\)", re.MULTILINE | re.DOTALL)
_GGUF_NAME = re.compile(r'^    gguf_name="([^"]+)"', re.MULTILINE)
_OWN_NAME = re.compile(r'^    name="([^"]+)"', re.MULTILINE)
CAUSAL = "ForCausalLM"
WRAPPERS = ("ForConditionalGeneration", "InternVLChatModel", "ForVisionText2Text", "OmniModel")
"""How names end of models that see pictures or hear; their language part may be of a family."""


@cache
def possible_architectures() -> frozenset[str] | None:
    """All names that the sources of this package quote, hence every architecture that a family has, and a few other words.

    Returns:
        None: further packages bring families of their own, whose names are not known without importing them.
    """
    if len(entry_points(group=_GROUP)):
        return None
    found = {
        name for file in Path(__file__).parent.rglob("*.py") for name in _NAME.findall(file.read_text(encoding="utf-8"))
    }
    return frozenset(found | {name.replace(CAUSAL, "Model") for name in found if name.endswith(CAUSAL)})


@cache
def gguf_architectures() -> frozenset[str] | None:
    """Every ``general.architecture`` of GGUF files that a family reads.

    Returns:
        None: further packages bring families of their own, whose names are not known without importing them.
    """
    if len(entry_points(group=_GROUP)):
        return None
    families = [
        settings
        for file in Path(__file__).parent.rglob("*.py")
        for settings in _FAMILY.findall(file.read_text("utf-8"))
    ]
    read = [settings for settings in families if "    from_gguf=None," not in settings]
    names = (_GGUF_NAME.search(settings) or _OWN_NAME.search(settings) for settings in read)
    return frozenset(name[1] for name in names if name)
