"""The vision part of LLaVA 1.5: one tile, a token for each patch. Source: Liu et al., "Visual Instruction Tuning", 2023."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sapwood_worker.model.vision.encoder import PatchEncoder, TwoLinears
from sapwood_worker.model.vision.mistral3 import PARTS
from sapwood_worker.model.vision.tower import CLIP_MEAN, CLIP_STD, Normaliser, Vision, VisionFamily, VisionFiles

_TOWERS = ("clip_vision_model", "siglip_vision_model")


class LlavaVision(Vision):
    """The vision part of LLaVA."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        config, kind = files.config, files.vision.get("model_type")
        layer, strategy = (
            config.get("vision_feature_layer", -2),
            config.get("vision_feature_select_strategy", "default"),
        )
        if kind not in _TOWERS or not isinstance(layer, int):
            raise ValueError(f"a tower {kind!r:.40} with vision_feature_layer {layer!r:.40} is not supported")
        self.token = files.token("image_token_index", "image_token_id")
        self._normalise = Normaliser(files.processor, CLIP_MEAN, CLIP_STD)
        self.vision_tower = PatchEncoder(files.vision, layer, normed=False)
        self._skipped = 1 if strategy == "default" else 0
        out, act = int(files.text["hidden_size"]), str(config.get("projector_hidden_act", "gelu"))
        bias = bool(config.get("multimodal_projector_bias", True))
        self.multi_modal_projector = TwoLinears(self.vision_tower.width, out, act, bias=bias)

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        side = self.vision_tower.side
        if tuple(shape) != (1, side, side):
            raise ValueError(f"a picture of {tuple(shape)}; it has one tile of {side} x {side} pixels")
        return self.vision_tower.patches**2 + self.vision_tower.leads - self._skipped

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        x = self.vision_tower(self._normalise(pixels))[:, self._skipped :]
        tokens: Tensor = self.multi_modal_projector(x)
        return tokens


TOWERS = {**PARTS, **{f"{start}vision_tower.vision_model.": "vision_tower." for start in ("", "model.")}}
"""How checkpoints with SigLIP's or CLIP's tower name the parts."""
LLAVA = VisionFamily("llava", ("LlavaForConditionalGeneration",), LlavaVision, TOWERS)
