"""The demo model generates what transformers generates from the same float32 weights."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.model

# Token ids, so that no tokenizer is needed here. The first is "<bos>The capital of France is".
PROMPTS = [
    [2, 818, 5279, 529, 7001, 563],
    [2, 1030, 563, 5628, 528, 506, 6029, 529, 506, 2891, 532, 563],
    # Longer than the window of 512.
    [2, *range(1000, 1550)],
]
COUNT = 64
# Logits this near each other, relative to the largest, are equal to float32 rounding.
TIE = 2e-5


def assert_greedy(oracle, prompt, tokens):
    """Each token is transformers' likeliest after those before it, or as good as equally likely.

    One pass over all of them: if each is right after the ones before, generating one by one gives the same.
    """
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
    best = logits.max(-1)
    gaps = best.values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    for at in gaps.nonzero().flatten().tolist():
        print(f"token {at} is {tokens[at]}, transformers' is {best.indices[at]}, logit gap {gaps[at]:.2e}")
    assert float(gaps.max()) <= TIE * float(best.values.abs().max())


def test_capital_of_france_continues_as_known(demo_runner, make_driver):
    tokens = make_driver(demo_runner).generate({0: PROMPTS[0]}, 9)[0]
    # " the capital of the country of France."
    assert tokens[:8] == [506, 5279, 529, 506, 2891, 529, 7001, 236761]


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_alone_and_together(demo_runner, demo_oracle, make_driver):
    together = make_driver(demo_runner).generate(dict(enumerate(PROMPTS)), COUNT)
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(demo_oracle, prompt, together[i])
        alone = make_driver(demo_runner).generate({0: prompt}, COUNT if i == 0 else 12)[0]
        assert_greedy(demo_oracle, prompt, alone)


@pytest.mark.slow
def test_logits_of_a_prompt_longer_than_the_window_equal_transformers(demo_runner, demo_oracle, make_driver):
    driver = make_driver(demo_runner)
    tokens = [2, *(7 + (i * 7919) % 200_000 for i in range(559))]
    driver.add(3, tokens)
    driver.runner.execute(driver.output({3: 540}))
    ours = driver.runner.logits(driver.output({3: 20}))
    with torch.inference_mode():
        theirs = demo_oracle(torch.tensor([tokens]), logits_to_keep=20).logits[0]
    # The output head rounds its input to 16 bits on processors with VNNI.
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_ends_are_the_end_of_text_and_the_end_of_a_turn(demo_runner):
    assert demo_runner.info.eos_token_ids == (1, 106)
    assert (demo_runner.info.architecture, demo_runner.info.dtype) == ("gemma3", "float32")
    assert demo_runner.info.context_length == 1024 * 16
