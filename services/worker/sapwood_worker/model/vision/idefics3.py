"""The vision part of Idefics 3 and SmolVLM: square tiles and the whole picture as one more, several patches to a token.

Sources: Idefics3 and SmolVLM, Hugging Face, 2024 and 2025.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from sapwood_worker.model.vision.encoder import PatchEncoder, shuffled
from sapwood_worker.model.vision.tower import HALF, Normaliser, Vision, VisionFamily, VisionFiles

_MOST_TILES = 128


class _Projection(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, out, bias=False)


class _Connector(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.modality_projection = _Projection(size, out)


class Idefics3Vision(Vision):
    """The vision part of Idefics 3."""

    def __init__(self, files: VisionFiles) -> None:
        super().__init__()
        self.token = files.token("image_token_id")
        self._factor = int(files.config.get("scale_factor", 2))
        self._normalise = Normaliser(files.processor, HALF, HALF)
        self.vision_model = PatchEncoder({"patch_size": 32, **files.vision}, -1, normed=True, by_share=True)
        if self._factor < 1 or self.vision_model.patches % self._factor:
            raise ValueError("scale_factor does not divide the patches of a tile")
        self.connector = _Connector(self.vision_model.width * self._factor**2, int(files.text["hidden_size"]))

    def count(self, shape: Sequence[int], layout: Sequence[int]) -> int:
        tiles, height, width = shape
        side = self.vision_model.side
        if not 1 <= tiles <= _MOST_TILES or (height, width) != (side, side):
            raise ValueError(f"{tiles} tiles of {height} x {width} pixels; they have {side} x {side}")
        return tiles * (self.vision_model.patches // self._factor) ** 2

    def encode(self, pixels: Tensor, layout: Sequence[int]) -> Tensor:
        x = self.vision_model(self._normalise(pixels))
        tokens: Tensor = self.connector.modality_projection.proj(shuffled(x, self.vision_model.patches, self._factor))
        return tokens.flatten(0, 1)[None]


IDEFICS3 = VisionFamily(
    "idefics3",
    ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    Idefics3Vision,
    {"model.vision_model.": "vision_model.", "model.connector.": "connector."},
)
