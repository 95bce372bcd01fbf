"""Models with a head that classifies, through all services: labels and scores are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sapwood.client import Client

pytestmark = pytest.mark.slow
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(60))]
QUERY, DOCUMENTS = "w1 w2", ["w3 w4 w5", "w6", "w1 w2 w7 w8 w9"]


def save(path: Path, config: Any, post_processor: Any) -> Any:
    """A model made up and its tokenizer; gives the model."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config.id2label, config._attn_implementation = {0: "fits"}, "eager"
    torch.manual_seed(8)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = post_processor
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("kind", ["bert", "llama", "roberta"])
def test_scores_rankings_and_labels_are_transformers(start_cluster_of: Any, tmp_path: Path, kind: str) -> None:
    import transformers
    from tokenizers import processors

    shape = {
        "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "bert":
        config, around = transformers.BertConfig(**shape), processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    elif kind == "roberta":
        config = transformers.XLMRobertaConfig(**shape, type_vocab_size=1)
        around = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    else:
        config = transformers.LlamaConfig(**shape)
        around = processors.TemplateProcessing("[CLS] $A", "[CLS] $A [SEP] $B", [("[CLS]", 2), ("[SEP]", 3)])
    oracle = save(tmp_path, config, around)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))

    def logit(*texts: str) -> float:
        given = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)
        kinds = {"token_type_ids": given["token_type_ids"]} if kind == "bert" else {}
        with torch.inference_mode():
            return float(oracle(given["input_ids"], **kinds).logits[0, 0])

    flags = ("--model", str(tmp_path), "--workers", "1", "--served-model-name", "judge", "--worker-device", "cpu")
    with start_cluster_of(*flags) as cluster:
        expected = [logit(QUERY, document) for document in DOCUMENTS]
        base = f"http://{cluster.http}"
        asked = {"model": "judge", "text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}
        scored = httpx.post(f"{base}/score", json=asked, timeout=120).json()
        assert [item["score"] for item in scored["data"]] == pytest.approx(expected, abs=1e-4)
        ranked = httpx.post(f"{base}/rerank", json={"query": QUERY, "documents": DOCUMENTS}, timeout=120).json()
        order = sorted(range(3), key=lambda index: -expected[index])
        assert [item["index"] for item in ranked["results"]] == order
        likely = [1 / (1 + torch.tensor(-expected[index]).exp().item()) for index in order]
        assert [item["relevance_score"] for item in ranked["results"]] == pytest.approx(likely, abs=1e-4)
        asked = {"model": "judge", "input": DOCUMENTS, "use_activation": False}
        told = httpx.post(f"{base}/classify", json=asked, timeout=120).json()
        alone = [logit(document) for document in DOCUMENTS]
        assert [item["probs"][0] for item in told["data"]] == pytest.approx(alone, abs=1e-4)
        with Client(cluster.grpc, timeout=120) as client:
            found = client.classify([(QUERY, DOCUMENTS[0]), DOCUMENTS[1]], raw=True)
        assert [each[0] for each in found.scores] == pytest.approx([expected[0], alone[1]], abs=1e-4)
        assert (found.labels, found.best()) == (("fits",), ["fits", "fits"])
