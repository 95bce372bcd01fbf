"""Hidden states and logits of encoders equal transformers' on tiny random models, padded together in one step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.scheduler.request import Request, SamplingParams
from sapwood_worker.model.runner.encoder_runner import EncoderRunner
from sapwood_worker.model.runner.options import RunnerOptions

SHAPE: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DISTILLED: dict[str, Any] = {
    "vocab_size": 90, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 320,
}  # fmt: skip
MODERN = {**SHAPE, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 12}
BIASED = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
GEMMA = {
    **SHAPE, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 10, "use_bidirectional_attention": True,
    "query_pre_attn_scalar": 24, "num_hidden_layers": 7,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": ("DistilBert", DISTILLED),
    "mpnet": ("MPNet", {**SHAPE, "pad_token_id": 1, "bos_token_id": 0}),
    "modernbert": ("ModernBert", MODERN),
    "modernbert-biased": ("ModernBert", {**MODERN, **BIASED}),
}


def save(name: str, head: str, path: Path, **changes: Any) -> Any:
    """A random model, saved as transformers does it."""
    import transformers

    kind, settings = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**settings, **changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return model


def vectors(path: Path, prompts: list[list[int]], pooling: Any) -> list[np.ndarray[Any, Any]]:
    """The vectors or logits of all prompts, by the scheduler."""
    runner = EncoderRunner(RunnerOptions(model_path=path, max_running=8, threads=1))
    scheduler, found = scheduler_for(runner.info, max_running=8, max_step_tokens=1024), {}
    for serial, prompt in enumerate(prompts):
        scheduler.add(Request(serial, f"e{serial}", prompt, SamplingParams(max_tokens=1), pooling=pooling))
    while scheduler.has_work:
        for output in scheduler.update(runner.execute(scheduler.schedule())):
            found[output.serial] = np.frombuffer(output.embedding, np.float32)
    return [found[serial] for serial in range(len(prompts))]


def prompts_of(*lengths: int) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(3, 90) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_hidden_states_of_an_encoder_equal_transformers(tmp_path: Path, name: str, head: str) -> None:
    model = save(name, head, tmp_path)
    oracle = model if head == "Model" else getattr(model, "model", model.base_model)
    prompts = prompts_of(1, 300, 17, 30)
    for prompt, vector in zip(prompts, vectors(tmp_path, prompts, "mean"), strict=True):
        with torch.inference_mode():
            hidden = oracle(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden.mean(0).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [10, 400])
def test_hidden_states_of_embedding_gemma_equal_transformers(tmp_path: Path, window: int) -> None:
    import transformers

    config = transformers.Gemma3TextConfig(**{**GEMMA, "sliding_window": window})
    config._attn_implementation = "eager"
    oracle = transformers.Gemma3TextModel(config).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in oracle.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    oracle.save_pretrained(tmp_path)
    prompts = prompts_of(1, 90, 17, 30)
    for prompt, vector in zip(prompts, vectors(tmp_path, prompts, "cls"), strict=True):
        with torch.inference_mode():
            hidden = oracle(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("distilbert", {}),
        ("mpnet", {}),
        ("modernbert", {}),
        ("modernbert-biased", {"classifier_pooling": "mean"}),
    ],
)
def test_an_encoders_labels_equal_transformers(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    names = {0: "sad", 1: "calm", 2: "glad"}
    oracle = save(name, "ForSequenceClassification", tmp_path, id2label=names, num_labels=3, **changes)
    prompts = prompts_of(3, 80, 17)
    for prompt, logits in zip(prompts, vectors(tmp_path, prompts, "labels"), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("distilbert", {"dim": 30}, "dim 30 is no multiple of n_heads 4"),
        ("distilbert", {"activation": "relu"}, "activation 'relu' is not supported"),
        ("distilbert", {"n_layers": 0}, "n_layers is 0; it can be a whole number from 1 on"),
        ("distilbert", {"hidden_dim": None}, "hidden_dim is missing"),
        ("mpnet", {"relative_attention_num_buckets": 8}, "relative_attention_num_buckets 8 is not supported"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types has to say"),
        ("modernbert", {"surprise": 3}, "surprise"),
        ("modernbert", {"vocab_size": 91}, r"tok_embeddings.weight is \[90, 32\], not \[91, 32\]"),
    ],
)
def test_settings_that_an_encoder_does_not_serve_are_named(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    save(name, "Model", tmp_path)
    file = tmp_path / "config.json"
    given = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    with pytest.raises(ConfigError, match=rf"config.json.*{message}|{message}"):
        EncoderRunner(RunnerOptions(model_path=tmp_path, max_running=4, threads=1))
