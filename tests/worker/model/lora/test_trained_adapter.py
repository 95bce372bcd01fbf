"""An adapter of the demo model, trained in a few steps by PEFT: what it has learnt shows in text, and in its own alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood_common.grammar.vocabulary import load_vocabulary
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.lora import Lora, LoraLoad

pytestmark = [pytest.mark.model, pytest.mark.slow]
PROMPT = [2, 818, 5279, 529, 7001, 563]
"""<bos>The capital of France is"""
SAYS = [" Sap", "wood"]
STEPS = 12


def train(oracle: Any, answer: list[int], folder: Path) -> Any:
    """Has PEFT train an adapter that answers the prompt, and save it; returns the merged model."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(oracle), config)
    tokens = torch.tensor([PROMPT + answer])
    labels = torch.tensor([[-100] * len(PROMPT) + answer])
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-3)
    with torch.enable_grad():
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = model(tokens).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[0, 1:], ignore_index=-100)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert loss.item() < 0.5, "it has learnt the answer"
    model.save_pretrained(str(folder))
    return model.merge_and_unload().eval()


def test_an_adapter_trained_in_a_few_steps_says_what_it_has_learnt_beside_the_base(
    demo_model: Path, demo_oracle: Any, make_driver: Any, tmp_path: Path
) -> None:
    vocabulary = load_vocabulary(demo_model)
    assert vocabulary is not None
    tokens = vocabulary.tokens
    answer = [tokens.index(word.encode()) for word in SAYS]
    merged = train(demo_oracle, answer, tmp_path)
    runner = build_runner(
        RunnerOptions(model_path=demo_model, num_pages=128, max_running=8, threads=1, lora_slots=1, lora_rank=4)
    )
    facts = runner.read_lora(Lora(1, "sapwood", str(tmp_path)))
    assert len(facts.modules) == 7
    driver = make_driver(runner)
    for row, slot in ((0, -1), (1, 0)):
        driver.add(row, PROMPT, lora_slot=slot)
    for number in range(8):
        step = driver.output(dict.fromkeys((0, 1), 1 if number else len(PROMPT)))
        step.lora_loads = () if number else (LoraLoad(0, 1),)
        for row, found in enumerate(runner.execute(step).token_ids):
            driver.tokens[row] += found
    base, adapted = (driver.tokens[row][len(PROMPT) :] for row in (0, 1))
    # " the capital of the country of France."
    assert base == [506, 5279, 529, 506, 2891, 529, 7001, 236761]
    assert adapted[: len(answer)] == answer
    with torch.inference_mode():
        logits = merged(torch.tensor([PROMPT + adapted[:-1]]), logits_to_keep=len(adapted)).logits[0].float()
    gaps = logits.max(-1).values - logits[torch.arange(len(adapted)), torch.tensor(adapted)]
    assert float(gaps.max()) <= 1e-3 * float(logits.abs().max()), "all of it is what the merged model says"
