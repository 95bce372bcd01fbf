"""Models with a head that classifies: their logits equal transformers', for texts and for pairs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sapwood.v1 import worker_pb2
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.front.convert import to_pooling
from sapwood_worker.model.families.family import read_labels
from sapwood_worker.model.runner.factory import make_runner as make_runner_of
from sapwood_worker.records.model_info import Labels

NAMES = {"0": "sad", "1": "calm", "2": "glad"}
SEP = 3


def logits_of(runner: Any, prompts: list[list[int]], step_tokens: int) -> list[np.ndarray[Any, Any]]:
    """The logits of all prompts, by the scheduler."""
    scheduler, found = scheduler_for(runner.info, max_running=4, max_step_tokens=step_tokens), {}
    for serial, prompt in enumerate(prompts):
        scheduler.add(Request(serial, f"c{serial}", prompt, SamplingParams(max_tokens=1), pooling="labels"))
    while scheduler.has_work:
        for output in scheduler.update(runner.execute(scheduler.schedule())):
            if output.finish_reason is not None:
                found[output.serial] = np.frombuffer(output.embedding, np.float32)
        scheduler.check()
    return [found[serial] for serial in range(len(prompts))]


def save_classifier(config: Any, path: Path) -> Any:
    """A model made up, saved as transformers does it."""
    import transformers

    config.id2label = {int(index): name for index, name in NAMES.items()}
    config._attn_implementation = "eager"
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval().float()
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    "name",
    [
        *("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma3TextConfig", "DeepseekV3Config"),
        *(
            "FalconConfig",
            "GPT2Config",
            "GPTBigCodeConfig",
            "GPTNeoConfig",
            "GPTNeoXConfig",
            "GPTJConfig",
            "OlmoConfig",
        ),
        *("OPTConfig", "PhiConfig"),
        *("GptOssConfig", "HeliumConfig", "MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig", "SeedOssConfig"),
    ],
)
@pytest.mark.parametrize("step_tokens", [7, 512])
def test_a_decoders_logits_equal_transformers(tmp_path: Path, name: str, step_tokens: int) -> None:
    import transformers

    shape = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    if name in ("MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma3TextConfig", "GptOssConfig", "MixtralConfig"):
        shape["sliding_window"] = 16
    if name in ("HeliumConfig", "OlmoConfig", "PhiConfig"):
        shape["num_attention_heads"] = 3
        shape["num_key_value_heads"] = 3
    if name.startswith(("Falcon", "GPT", "OPT")):
        shape["num_attention_heads"] = 3
        for left in ("num_key_value_heads", "head_dim", "intermediate_size"):
            del shape[left]
    if name == "GPTJConfig":
        shape["rotary_dim"] = 8
    if name == "GPTNeoConfig":
        shape["attention_types"] = [[["global", "local"], 1]]
    if name == "OPTConfig":
        shape |= {"ffn_dim": 80, "word_embed_proj_dim": 48}
    if name.startswith("Qwen") and name.endswith("MoeConfig"):
        shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if name == "Qwen2MoeConfig":
        shape["shared_expert_intermediate_size"] = 40
    if name == "GptOssConfig":
        shape |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}
    if name == "DeepseekV3Config":
        shape |= {
            "num_key_value_heads": 6,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 16,
        }
        shape |= {
            "kv_lora_rank": 24,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "v_head_dim": 10,
        }
    oracle = save_classifier(getattr(transformers, name)(**shape), tmp_path)
    config = WorkerConfig(model=str(tmp_path), device="cpu", num_pages=64, page_size=16, max_running=4, threads=1)
    runner = make_runner_of(config)
    assert runner.info.labels == Labels(tuple(NAMES.values()), "softmax")
    assert (runner.info.generates, runner.info.embedding_size, runner.info.encodes) == (False, 0, False)
    chance = random.Random(6)
    shared = [chance.randrange(3, 97) for _ in range(40)]
    prompts = [shared[: 9 * n + 1] + [chance.randrange(3, 97) for _ in range(n)] for n in range(5)]
    for prompt, logits in zip(prompts, logits_of(runner, prompts, step_tokens), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def save_cross_encoder(path: Path, **changes: Any) -> Any:
    """A BERT that classifies and its tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    oracle = save_classifier(
        transformers.BertConfig(
            vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, **changes,
        ),
        path,
    )  # fmt: skip
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(86))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", 2))
    tokenizer.save(str(path / "tokenizer.json"))
    return oracle


def test_an_encoders_logits_equal_transformers_for_texts_and_for_pairs(tmp_path: Path) -> None:
    oracle = save_cross_encoder(tmp_path)
    config = WorkerConfig(model=str(tmp_path), device="cpu", max_running=4, threads=1)
    runner = make_runner_of(config)
    assert runner.info.labels == Labels(tuple(NAMES.values()), "softmax")
    chance = random.Random(7)
    sequences = []
    for first, second in ((1, 0), (9, 0), (3, 4), (1, 50), (30, 1)):
        ids = [2, *(chance.randrange(4, 90) for _ in range(first)), SEP]
        kinds = [0] * len(ids)
        if second:
            ids += [*(chance.randrange(4, 90) for _ in range(second)), SEP]
            kinds += [1] * (second + 1)
        sequences.append((ids, kinds))
    found = logits_of(runner, [ids for ids, _ in sequences], 512)
    for (ids, kinds), logits in zip(sequences, found, strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_cross_encoder_of_robertas_kind_gives_transformers_logits(tmp_path: Path) -> None:
    import transformers

    config = transformers.XLMRobertaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, type_vocab_size=1, pad_token_id=1,
    )  # fmt: skip
    oracle = save_classifier(config, tmp_path)
    runner = make_runner_of(WorkerConfig(model=str(tmp_path), device="cpu", max_running=4, threads=1))
    assert runner.info.labels == Labels(tuple(NAMES.values()), "softmax")
    chance = random.Random(8)
    # A pair is "<s> a </s></s> b </s>".
    pairs = [
        [0, *chance.choices(range(4, 90), k=a), 2, 2, *chance.choices(range(4, 90), k=b), 2]
        for a, b in ((3, 9), (20, 30))
    ]
    for ids, logits in zip(pairs, logits_of(runner, pairs, 512), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_classifies_makes_no_embeddings_and_the_other_way_round(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path)
    info = make_runner_of(WorkerConfig(model=str(tmp_path), device="cpu", threads=1)).info
    assert to_pooling(worker_pb2.POOLING_UNSPECIFIED, info) == to_pooling(worker_pb2.POOLING_LABELS, info) == "labels"
    with pytest.raises(InvalidArgumentError, match="makes no embeddings"):
        to_pooling(worker_pb2.POOLING_MEAN, info)
    plain = msgspec.structs.replace(info, labels=None, pooling="mean", embedding_size=32)
    with pytest.raises(InvalidArgumentError, match="no head that classifies"):
        to_pooling(worker_pb2.POOLING_LABELS, plain)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Labels(("LABEL_0", "LABEL_1"), "softmax")),
        ({"id2label": {"1": "b", "0": "a"}}, Labels(("a", "b"), "softmax")),
        ({"id2label": {"0": "fits"}}, Labels(("fits",), "sigmoid")),
        ({"id2label": {"0": "reward"}, "problem_type": "regression"}, Labels(("reward",), "none")),
        ({"problem_type": "multi_label_classification"}, Labels(("LABEL_0", "LABEL_1"), "sigmoid")),
        (
            {
                "id2label": {"0": "fits"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            Labels(("fits",), "none"),
        ),
    ],
)
def test_the_files_say_what_makes_scores_of_logits(values: dict[str, Any], expected: Labels) -> None:
    assert read_labels(values) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"problem_type": "ranking"}, "problem_type 'ranking' is not supported"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation torch.nn.Tanh is not supported"),
        ({"id2label": ["a"]}, "id2label is no mapping"),
    ],
)
def test_a_head_that_is_not_understood_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    save_cross_encoder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=problem):
        make_runner_of(WorkerConfig(model=str(tmp_path), device="cpu", threads=1))


def test_a_vocabulary_without_the_token_that_ends_texts_is_refused(tmp_path: Path) -> None:
    save_cross_encoder(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("[SEP]", "[END]"))
    with pytest.raises(ConfigError, match=r"no token \[SEP\]"):
        make_runner_of(WorkerConfig(model=str(tmp_path), device="cpu", threads=1))


def test_settings_of_generations_are_refused_by_name(tmp_path: Path) -> None:
    import transformers

    shape = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    save_classifier(transformers.LlamaConfig(num_attention_heads=2, pad_token_id=0, **shape), tmp_path)
    config = WorkerConfig.model_validate({"model": str(tmp_path), "device": "cpu", "jump_forward": False})
    with pytest.raises(ConfigError, match="has no effect with a model that only classifies"):
        make_runner_of(config)
