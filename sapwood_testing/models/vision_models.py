"""Tiny random models that take pictures, with tokenizers, and transformers' own copy of each as the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sapwood_testing.models.video_processor import image_processor

TEXT: dict[str, Any] = {
    "vocab_size": 278, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 256,
    "eos_token_id": 258, "pad_token_id": 0,
}  # fmt: skip
_SPECIAL = (
    *("<|begin|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *(
        "<|video_pad|>",
        "<start_of_image>",
        "<end_of_image>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "<fake_token>",
        "<global-img>",
    ),
    *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    *("<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)
"""The ids of these follow those of the bytes, in order."""
IMAGE = 256 + _SPECIAL.index("<|image_pad|>")
QWEN_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}\
<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class VisionModel:
    """How a tiny model is made.

    Attributes:
        make: Makes transformers' model.
        processor: What ``preprocessor_config.json`` says.
        processor_class: The image processor's class in transformers; or, of one that needs torchvision, its family.
        template: The chat template.
        special: Tokens of the tokenizer behind the bytes.
        types: What transformers calls the input that says which tokens stand for pictures; empty: it takes none.
        left_out: What the processor gives and the model does not take.
        nested: Whether the processor takes the pictures of each prompt as a list.
        video: What ``video_preprocessor_config.json`` says; empty: there is no such file.
    """

    make: Callable[[], Any]
    processor: dict[str, Any]
    processor_class: str
    template: str = QWEN_TEMPLATE
    special: Sequence[str] = _SPECIAL
    types: str = "mm_token_type_ids"
    left_out: Sequence[str] = ()
    nested: bool = False
    video: dict[str, Any] = field(default_factory=dict)


@dataclass
class TinyVision:
    """A tiny model on disk.

    Attributes:
        path: Its folder.
        oracle: transformers' copy.
        processor: transformers' image processor.
        made: How it was made.
        image: The id of tokens that stand for pictures.
        settings: Those of the processor.
    """

    path: Path
    oracle: Any
    processor: Any
    made: VisionModel
    image: int = IMAGE
    settings: dict[str, Any] = field(default_factory=dict)

    def inputs(self, tokens: Sequence[int], pictures: Sequence[Any]) -> dict[str, Any]:
        """What transformers takes of a prompt and its pictures (Pillow's)."""
        ids = torch.tensor([list(tokens)])
        if not pictures:
            return {"input_ids": ids}
        found = dict(
            self.processor(images=[list(pictures)] if self.made.nested else list(pictures), return_tensors="pt")
        )
        given = {
            name: value.float() if value.dtype == torch.bfloat16 else value
            for name, value in found.items()
            if name not in self.made.left_out
        }
        if self.made.types:
            given[self.made.types] = (ids == self.image).int()
        return {"input_ids": ids, **given}

    def logits(self, tokens: Sequence[int], pictures: Sequence[Any]) -> torch.Tensor:
        """transformers' logits after every token, float32 [T, vocab]."""
        with torch.no_grad():
            result: torch.Tensor = self.oracle(**self.inputs(tokens, pictures)).logits[0]
        return result

    def greedy(self, tokens: Sequence[int], pictures: Sequence[Any], count: int) -> list[int]:
        """transformers' next tokens, each computed from all tokens before it; an end token ends nothing."""
        known = list(tokens)
        for _ in range(count):
            known.append(int(self.logits(known, pictures)[-1].argmax()))
        return known[len(tokens) :]


def _rope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}


_IDS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "vision_start_token_id": IMAGE - 2,
    "vision_end_token_id": IMAGE - 1,
}  # fmt: skip


def _qwen2_5_vl() -> Any:
    import transformers

    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [1], "window_size": 112,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": _rope(2, 3, 3)}, vision_config=vision, **_IDS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    import transformers

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": _rope(4, 2, 2)}, vision_config=vision, **_IDS
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


_QWEN2_PROCESSOR = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 40,
}  # fmt: skip


_QWEN2_VIDEO = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 8},
}  # fmt: skip


def _qwen3_vl() -> Any:
    import transformers

    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    text = {**TEXT, "head_dim": 16, "rope_parameters": _rope(4, 2, 2, mrope_interleaved=True)}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_IDS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _mistral3() -> Any:
    import transformers

    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "image_size": 280, "patch_size": 14,
    }  # fmt: skip
    text = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _internvl() -> Any:
    import transformers

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [56, 56], "patch_size": [14, 14], "use_qk_norm": True,
    }  # fmt: skip
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config=vision,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def _llava() -> Any:
    import transformers

    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "projection_dim": 16,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_index=IMAGE,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def _llava_next() -> Any:
    import transformers

    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "projection_dim": 16,
    }  # fmt: skip
    config = transformers.LlavaNextConfig(
        text_config={**TEXT, "model_type": "mistral"}, vision_config=vision, image_token_index=IMAGE,
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]], tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(config)


def _llava_onevision() -> Any:
    import transformers

    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = transformers.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config=vision, image_token_index=IMAGE,
        image_grid_pinpoints=_ONEVISION_GRIDS, vision_aspect_ratio="anyres_max_2", tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlavaOnevisionForConditionalGeneration(config)


_ONEVISION_GRIDS = [[56 * rows, 56 * columns] for rows in range(1, 4) for columns in range(1, 4)]


def _llama4() -> Any:
    import transformers

    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 14, "projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4, "attention_chunk_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=False
    )
    # transformers 5.24 takes a field of the language part's result that is not there.
    output: Any = transformers.modeling_outputs.MoeCausalLMOutputWithPast
    output.image_outputs = None
    return transformers.Llama4ForConditionalGeneration(config)


def _gemma3() -> Any:
    import transformers

    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 7, "vision_use_head": False,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 13, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, boi_token_index=IMAGE + 2, eoi_token_index=IMAGE + 3,
        mm_tokens_per_image=16, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _idefics3(kind: str) -> Any:
    import transformers

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 7,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_id=IMAGE, scale_factor=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


_IDEFICS3_PROCESSOR = {
    "size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "resample": 1,
}  # fmt: skip
VISION: dict[str, VisionModel] = {
    "qwen2_5_vl": VisionModel(_qwen2_5_vl, _QWEN2_PROCESSOR, "Qwen2VLImageProcessorPil", video=_QWEN2_VIDEO),
    "qwen2_vl": VisionModel(_qwen2_vl, _QWEN2_PROCESSOR, "Qwen2VLImageProcessorPil", video=_QWEN2_VIDEO),
    "qwen3_vl": VisionModel(
        _qwen3_vl,
        {
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 40},
        },
        "Qwen2VLImageProcessorPil",
        video={
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 60},
        },
    ),
    "gemma3": VisionModel(
        _gemma3,
        {
            "size": {"height": 56, "width": 56},
            "resample": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "Gemma3ImageProcessorPil",
        types="token_type_ids",
        left_out=("num_crops",),
    ),
    "idefics3": VisionModel(
        partial(_idefics3, "Idefics3"), _IDEFICS3_PROCESSOR, "Idefics3ImageProcessorPil", types="", nested=True
    ),
    "smolvlm": VisionModel(
        partial(_idefics3, "SmolVLM"), _IDEFICS3_PROCESSOR, "SmolVLMImageProcessorPil", types="", nested=True
    ),
    "mistral3": VisionModel(
        _mistral3,
        {"patch_size": {"height": 28, "width": 28}, "size": {"longest_edge": 180}},
        "PixtralImageProcessorPil",
        types="",
    ),
    "internvl": VisionModel(
        _internvl,
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6},
        "GotOcr2ImageProcessorPil",
        types="",
        left_out=("num_patches",),
    ),
    "llava": VisionModel(
        _llava,
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        "CLIPImageProcessorPil",
        types="",
    ),
    "llama4": VisionModel(
        _llama4,
        {"size": {"height": 56, "width": 56}, "max_patches": 6},
        "llama4",
        types="",
        left_out=("aspect_ratios",),
    ),
    "llava_next": VisionModel(
        _llava_next,
        {
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        },
        "LlavaNextImageProcessorPil",
        types="",
    ),
    "llava_onevision": VisionModel(
        _llava_onevision,
        {
            "size": {"height": 56, "width": 56},
            "image_grid_pinpoints": _ONEVISION_GRIDS,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "LlavaOnevisionImageProcessorPil",
        types="",
        nested=True,
    ),
}
"""By family."""


def make_vision(name: str, folder: Path) -> TinyVision:
    """A model of random weights by its family, saved in a folder with its tokenizer, template and processor."""
    chosen = VISION[name]
    torch.manual_seed(1)
    model = chosen.make().eval().float()
    model.config._attn_implementation = "eager"
    for each, weight in model.named_parameters():
        is_norm = weight.dim() == 1 and ("norm" in each or "ln_q" in each) and each.endswith("weight")
        torch.nn.init.normal_(weight, float(is_norm and "gemma" not in name), 0.12)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(chosen.processor))
    if chosen.video:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(chosen.video))
    (folder / "chat_template.jinja").write_text(chosen.template)
    save_tokenizer(folder, chosen.special)
    return TinyVision(folder, model, processor_of(chosen), chosen, settings=chosen.processor)


def processor_of(chosen: VisionModel) -> Any:
    """transformers' image processor of a model."""
    import transformers

    if not chosen.processor_class.endswith("Pil"):
        return image_processor(chosen.processor_class, chosen.processor)
    return getattr(transformers, chosen.processor_class)(**chosen.processor)


def save_tokenizer(folder: Path, special: Sequence[str]) -> None:
    """A tokenizer whose tokens are the bytes, and some special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: index for index, letter in enumerate(sorted(letters))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
