"""The demo model with its MLPs copied into experts, from shards with an index: the dense model's text, and transformers' own."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import packaged_path
from sapwood_testing.models.upcycled import upcycle
from sapwood_testing.worker.split_models import load, logits_of
from sapwood_testing.worker.thread_ranks import run_ranks
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.cache.host import HostPages
from sapwood_worker.core.scheduler.config import SchedulerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.model.distributed.parallel import Parallel

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    [2, 818, 5279, 529, 7001, 563],
    [2, 1030, 563, 5628, 528, 506, 6029, 529, 506, 2891, 532, 563],
    [2, *range(1000, 1150)],
]
EXPERTS, COUNT = 4, 16
TOLERANCE = 2e-5


@pytest.fixture
def sparse_family(plugin):
    plugin(
        "sapwood.model_families",
        "gemma3_sparse",
        "from sapwood_testing.models.upcycled import FAMILY",
        "FAMILY",
    )


def assert_likeliest(logits, tokens):
    """Each token is the likeliest, or as good as equally likely."""
    best = logits.max(-1)
    gaps = best.values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert float(gaps.max()) <= TOLERANCE * float(best.values.abs().max())


def test_equal_experts_give_the_dense_models_text(sparse_family, demo_oracle, make_runner, make_driver, tmp_path):
    path = tmp_path / "equal"
    upcycle(packaged_path("demo-base"), path, experts=EXPERTS, chosen=2)
    runner = make_runner(path, num_pages=256)
    assert runner.info.architecture == "gemma3_sparse"
    answers = make_driver(runner).generate(dict(enumerate(PROMPTS)), COUNT)
    for slot, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            logits = demo_oracle(torch.tensor([prompt + answers[slot][:-1]]), logits_to_keep=COUNT).logits[0]
        assert_likeliest(logits, answers[slot])
    # The same from ranks that have some of the experts each.
    text = PROMPTS[0] + answers[0]
    del runner
    for size in (2, 4):
        for part in run_ranks(size, lambda group: logits_of_rank(path, text[:-1], Parallel(tp=group, ep=group))):
            assert_likeliest(part[-COUNT:], answers[0])


def greedy(runner, scheduler, prompts, put_back_at=-1):
    """The answers to all prompts asked at once, and then once more after the first tier has been cleared.

    All requests are put back before a step of each time.
    """
    received = {}
    for turn in range(2):
        for serial, prompt in enumerate(prompts, turn * len(prompts)):
            sampling = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
            scheduler.add(Request(serial, str(serial), array("I", prompt), sampling))
        if turn and put_back_at >= 0:
            scheduler.clear_device()
        steps = 0
        while scheduler.has_work or scheduler.has_copies:
            if steps == put_back_at:
                running = scheduler.load().running_requests
                scheduler.pause(retract=True)
                assert scheduler.load().running_requests == 0 < running
                scheduler.resume()
            steps += 1
            if planned := scheduler.schedule():
                for output in scheduler.update(runner.execute(planned)):
                    received.setdefault(output.serial, []).extend(output.token_ids)
    return [received[serial] for serial in range(2 * len(prompts))]


def test_the_text_stays_where_requests_are_put_back_and_come_from_the_second_tier(sparse_family, make_runner, tmp_path):
    path = tmp_path / "equal"
    upcycle(packaged_path("demo-base"), path, experts=EXPERTS, chosen=2)
    prompts = [[2, *range(start, start + 40)] for start in (1000, 2000, 3000)]
    config = SchedulerConfig(
        page_size=16, num_pages=10, context_length=200, max_running=3, max_step_tokens=48, conservativeness=0.0
    )
    dense = make_runner(packaged_path("demo-base"), num_pages=64, max_running=3)
    plain = Scheduler(replace(config, windows=dense.info.windows, num_pages=64, prefix_cache=False))
    expected = greedy(dense, plain, prompts)
    runner = make_runner(path, num_pages=10, max_running=3, host_cache_ratio=6.0)
    tiers = HierarchicalCache(HostPages(runner.host_pool.num_pages), 10, 16, "write_through")
    scheduler = Scheduler(replace(config, windows=runner.info.windows), tiers)
    assert greedy(runner, scheduler, prompts, put_back_at=8) == expected
    assert tiers.counters.host_hits > 0


def logits_of_rank(path, tokens, parallel):
    return logits_of(load(path, parallel), tokens, parallel)


def transformers_own(path, demo_oracle):
    """The oracle with its MLPs replaced by transformers' mixture, and the directory's experts in them."""
    import copy

    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    settings = json.loads((path / "config.json").read_text())
    config = Qwen3MoeConfig(
        hidden_size=settings["hidden_size"],
        moe_intermediate_size=settings["intermediate_size"],
        num_experts=settings["num_experts"],
        num_experts_per_tok=settings["num_experts_per_tok"],
        norm_topk_prob=True,
        hidden_act="gelu_pytorch_tanh",
    )
    where = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(path / name, framework="pt") for name in set(where.values())}

    def tensor(name):
        return files[where[name]].get_tensor(name)

    model = copy.deepcopy(demo_oracle)
    for index, layer in enumerate(model.model.layers):
        stem = f"model.layers.{index}.mlp"
        experts = [f"{stem}.experts.{each}" for each in range(config.num_experts)]
        block = Qwen3MoeSparseMoeBlock(config).eval()
        block.load_state_dict(
            {
                "gate.weight": tensor(f"{stem}.gate.weight"),
                "experts.gate_up_proj": torch.stack(
                    [torch.cat([tensor(f"{each}.{part}_proj.weight") for part in ("gate", "up")]) for each in experts]
                ),
                "experts.down_proj": torch.stack([tensor(f"{each}.down_proj.weight") for each in experts]),
            }
        )
        layer.mlp = block
    return model


def test_unequal_experts_equal_transformers(sparse_family, demo_oracle, make_runner, make_driver, tmp_path):
    path = tmp_path / "noisy"
    upcycle(packaged_path("demo-base"), path, experts=EXPERTS, chosen=2, noise=0.2)
    driver = make_driver(make_runner(path, num_pages=256))
    oracle = transformers_own(path, demo_oracle)
    tokens = PROMPTS[2]
    with torch.inference_mode():
        theirs, dense = (model(torch.tensor([tokens])).logits[0] for model in (oracle, demo_oracle))
    driver.add(0, tokens)
    parts = [driver.runner.logits(driver.output({0: size})) for size in (64, 1, 86)]
    scale = theirs.abs().max()
    assert (torch.cat(parts) - theirs).abs().max() <= TOLERANCE * scale
    # It is another model than the dense one.
    assert (dense - theirs).abs().max() > 0.1 * scale
