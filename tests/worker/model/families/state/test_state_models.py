"""Logits and text of models with states equal transformers', however tokens are cut into steps and wherever requests resume."""

from __future__ import annotations

import json
import random
from array import array

import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.models.same_logits import assert_mixed_steps_equal, assert_same_logits, tokens_of
from sapwood_testing.models.state_models import STATE
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_testing.worker.split_models import load, logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.model.distributed.parallel import Parallel

_SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16}
SPLIT = {
    "lfm2": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
    "qwen3-next": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3.5": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3.5-moe": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "lfm2-moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
    "minimax": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "jamba": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mamba2": {},
    "bamba": _SHAPE,
    "granite-hybrid-dense": _SHAPE,
    "granite-hybrid": _SHAPE,
    "falcon-h1": {**_SHAPE, "mamba_d_ssm": 128},
    "nemotron-h": {"num_attention_heads": 4},
}
"""Models that can be split over two ranks, with what differs so that they can."""
TOLERANCES = dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), 1e-4)
"""Where transformers' own logits in float32 are that far from those in float64: a norm enlarges what is nearly zero."""


def usually(*names, known=STATE):
    """All models, those but the named ones among the slow tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in known]


@pytest.mark.parametrize("name", STATE)
def test_logits_of_a_whole_prompt_and_of_mixed_steps_equal_transformers(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    runner = make_runner(tiny.path)
    driver = make_driver(runner)
    tokens = tokens_of(150)
    driver.add(5, tokens)
    assert_same_logits(runner.logits(driver.output({5: 150})), tiny.logits(tokens), TOLERANCES.get(name, 2e-5))
    assert_mixed_steps_equal(make_driver(runner), tiny, TOLERANCES.get(name, 2e-5))


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", usually("lfm2", "qwen3-next", "nemotron-h"))
def test_logits_in_chunks_equal_transformers(tiny_model, make_runner, make_driver, name, chunk):
    tiny = tiny_model(name)
    driver = make_driver(make_runner(tiny.path, page_size=4))
    tokens = tokens_of(30 * min(chunk, 5), seed=1)
    driver.add(2, tokens)
    parts = []
    while driver.cached[2] < len(tokens):
        parts.append(driver.runner.logits(driver.output({2: min(chunk, len(tokens) - driver.cached[2])})))
    assert_same_logits(torch.cat(parts), tiny.logits(tokens), TOLERANCES.get(name, 2e-5))


def run(scheduler, runner, check=True):
    """Runs a scheduler's requests to their end; returns the output tokens of each by its serial."""
    outputs = {}
    while scheduler.has_work:
        step = scheduler.schedule()
        for output in scheduler.update(runner.execute(step)) if step else ():
            outputs.setdefault(output.serial, []).extend(output.token_ids)
            assert output.finish_reason != "error", output.error
        if check:
            scheduler.check()
    return outputs


def assert_greedy(tiny, prompt, output):
    """Asserts that each token of an output is the likeliest one by transformers' logits of all tokens before it."""
    expected = tiny.logits([*prompt, *output])[len(prompt) - 1 : -1].argmax(-1)
    assert output == expected.tolist()


def request(serial, prompt, count):
    return Request(serial, str(serial), prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("name", usually("lfm2", "qwen3-next", "falcon-h1"))
def test_conversations_that_share_beginnings_get_transformers_text(tiny_model, make_runner, name, page_size):
    tiny = tiny_model(name)
    runner = make_runner(tiny.path, page_size=page_size, num_pages=2048 // page_size)
    scheduler = scheduler_for(runner.info, max_step_tokens=41)
    rng = random.Random(page_size)
    system = tokens_of(70, seed=9)
    talks = [[*system, *rng.choices(range(3, 97), k=rng.randint(5, 40))] for _ in range(3)]
    for turn in range(3):
        for serial, talk in enumerate(talks, 10 * turn):
            scheduler.add(request(serial, talk, 18))
        outputs = run(scheduler, runner)
        for serial, talk in enumerate(talks, 10 * turn):
            assert len(outputs[serial]) == 18
            assert_greedy(tiny, talk, outputs[serial])
            talk += [*outputs[serial], *rng.choices(range(3, 97), k=rng.randint(1, 30))]
    load = scheduler.load()
    assert load.cached_tokens > 0.6 * load.prompt_tokens


@pytest.mark.parametrize("name", usually("qwen3-next", "nemotron-h", known=SPLIT))
def test_logits_of_two_ranks_are_those_of_one(tiny_model, name):
    path = tiny_model(name, **SPLIT[name]).path
    tokens = tokens_of(70)
    whole = logits_of(load(path), tokens)
    parts = run_ranks(2, lambda group: logits_of(load(path, Parallel(tp=group)), tokens, Parallel(tp=group)))
    assert torch.equal(parts[0], parts[1])
    assert_same_logits(parts[0], whole, TOLERANCES.get(name, 2e-5))


def test_the_text_of_a_qwen_that_sees_is_served(tiny_model, make_runner, make_driver, tmp_path):
    tiny = tiny_model("qwen3.5")
    text = json.loads((tiny.path / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tiny.path / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file({**inside, "model.visual.pos_embed.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    driver, tokens = make_driver(make_runner(tmp_path)), tokens_of(40)
    driver.add(0, tokens)
    assert_same_logits(driver.runner.logits(driver.output({0: 40})), tiny.logits(tokens), 1e-4)


def test_tokens_computed_again_for_their_states_leave_shared_pages_as_they_are(tiny_model, make_runner):
    tiny = tiny_model("qwen3-next")
    runner = make_runner(tiny.path, page_size=16)
    scheduler = scheduler_for(runner.info)
    system = tokens_of(64, seed=4)
    scheduler.add(request(0, [*system, *tokens_of(40, seed=5)], 4))
    run(scheduler, runner)
    [layer] = runner._pool.pages
    found = scheduler._cache._tree.match(array("I", system).tobytes()).pages
    assert len(found) == 4
    before = runner._pool.pages[layer][found].clone()
    prompt = [*system, *tokens_of(50, seed=6)]
    scheduler.add(request(1, prompt, 4))
    step = scheduler.schedule()
    assert step.starts.tolist() == [0] and step.again.tolist() == [64], "no state, but all pages of the system prompt"
    outputs = [*scheduler.update(runner.execute(step))]
    assert torch.equal(runner._pool.pages[layer][found], before)
    answer = [*outputs[0].token_ids, *run(scheduler, runner)[1]]
    assert_greedy(tiny, prompt, answer)
    scheduler.add(request(2, [*system, *tokens_of(50, seed=7)], 4))
    assert scheduler.schedule().starts.tolist() == [64], "the second request that branched off has left a snapshot"


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_a_request_without_a_cached_beginning_starts_from_zeros_in_a_used_row(tiny_model, make_runner, name):
    tiny = tiny_model(name)
    runner = make_runner(tiny.path, max_running=1)
    scheduler = scheduler_for(runner.info, prefix_cache=False)
    for serial in range(2):
        prompt = tokens_of(30, seed=serial)
        scheduler.add(request(serial, prompt, 8))
        assert_greedy(tiny, prompt, run(scheduler, runner)[serial])
