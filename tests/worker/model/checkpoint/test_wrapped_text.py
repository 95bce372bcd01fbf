"""The text part of models that see or hear, as transformers saves them: the same logits, for prompts and for what follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni, modeling_qwen2_5_omni
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe, modeling_qwen3_omni_moe

TEXT: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SEEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
HEARD = {
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": 64,
    "num_mel_bins": 8, "max_source_positions": 20,
}  # fmt: skip
DEEP = {**SEEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def rope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}


def qwen3_vl_moe() -> Any:
    text = {**TEXT, **EXPERTS, "rope_parameters": rope(4, 2, 2, mrope_interleaved=True)}
    return transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(text_config=text, vision_config=DEEP, tie_word_embeddings=False)
    )


def glm4v_moe() -> Any:
    text = {
        **TEXT, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5, "rope_parameters": rope(1, 1, 2, partial_rotary_factor=0.5),
    }  # fmt: skip
    return transformers.Glm4vMoeForConditionalGeneration(
        transformers.Glm4vMoeConfig(text_config=text, vision_config=SEEN, tie_word_embeddings=False)
    )


def ministral3() -> Any:
    return transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**TEXT, head_dim=16, rope_parameters=dict(YARN))
    )


def mistral3() -> Any:
    text = {**TEXT, "model_type": "ministral3", "head_dim": 16, "rope_parameters": dict(YARN)}
    seen = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text, vision_config=seen, tie_word_embeddings=False)
    )


def qwen2_5_omni() -> Any:
    config = configuration_qwen2_5_omni.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": rope(2, 3, 3)},
        vision_config={**SEEN, "fullatt_block_indexes": [0]},
        audio_config=HEARD,
        tie_word_embeddings=False,
    )
    return modeling_qwen2_5_omni.Qwen2_5OmniThinkerForConditionalGeneration(config)


def qwen3_omni_moe() -> Any:
    config = configuration_qwen3_omni_moe.Qwen3OmniMoeThinkerConfig(
        text_config={
            **TEXT, **EXPERTS, "norm_topk_prob": True, "rope_parameters": rope(4, 2, 2, mrope_interleaved=True),
        },
        vision_config=DEEP,
        audio_config={**HEARD, "downsample_hidden_size": 8, "num_hidden_layers": 1},
        tie_word_embeddings=False,
    )  # fmt: skip
    return modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration(config)


MODELS = (qwen3_vl_moe, glm4v_moe, ministral3, mistral3, qwen2_5_omni, qwen3_omni_moe)
IDS = list(range(3, 60))


def saved(make: Callable[[], Any], folder: Path) -> Any:
    """A model of random weights, after it was saved."""
    torch.manual_seed(1)
    model = make()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, float("norm" in name), 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)
    model.eval().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # as Qwen publishes them
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits


def assert_logits(folder: Path, model: Any, make_runner: Any, make_driver: Any) -> None:
    """Two chunks of a prompt: the second one sees the first one's keys and values in the cache."""
    driver, theirs = make_driver(make_runner(folder)), expected(model, IDS)
    driver.add(0, IDS)
    for begin, end in ((0, 20), (20, len(IDS))):
        ours = driver.runner.logits(driver.output({0: end - begin}))
        assert (ours - theirs[begin:end]).norm() < 1e-4 * theirs[begin:end].norm()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_text_of_a_wrapped_model_has_the_logits_of_transformers(
    make: Callable[[], Any], make_runner: Any, make_driver: Any, tmp_path: Path
) -> None:
    assert_logits(tmp_path, saved(make, tmp_path), make_runner, make_driver)


@pytest.mark.parametrize(
    ("make", "architecture"),
    [(qwen2_5_omni, "Qwen2_5OmniModel"), (qwen3_omni_moe, "Qwen3OmniMoeForConditionalGeneration")],
    ids=["qwen2_5_omni", "qwen3_omni_moe"],
)
def test_the_thinker_of_a_model_that_also_speaks_is_served_without_what_speaks(
    make: Callable[[], Any], architecture: str, make_runner: Any, make_driver: Any, tmp_path: Path
) -> None:
    model = saved(make, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": [architecture], "thinker_config": config, "talker_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {f"thinker.{name}": each for name, each in load_file(tmp_path / "model.safetensors").items()}
    spoken = {f"{part}.x": torch.zeros(3) for part in ("talker.model", "token2wav.dit", "code2wav.decoder")}
    save_file(tensors | spoken, tmp_path / "model.safetensors")
    assert_logits(tmp_path, model, make_runner, make_driver)
