"""The families of vision parts."""

from __future__ import annotations

from sapwood_worker.model.vision.gemma3 import GEMMA3
from sapwood_worker.model.vision.idefics3 import IDEFICS3
from sapwood_worker.model.vision.internvl import INTERNVL
from sapwood_worker.model.vision.llama4 import LLAMA4
from sapwood_worker.model.vision.llava import LLAVA
from sapwood_worker.model.vision.llava_next import LLAVA_NEXT
from sapwood_worker.model.vision.mistral3 import MISTRAL3
from sapwood_worker.model.vision.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from sapwood_worker.model.vision.qwen3_vl import QWEN3_VL
from sapwood_worker.model.vision.tower import VisionFamily

_FAMILIES = (GEMMA3, IDEFICS3, INTERNVL, LLAMA4, LLAVA, LLAVA_NEXT, MISTRAL3, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)


def vision_families() -> tuple[VisionFamily, ...]:
    """All of them."""
    return _FAMILIES
