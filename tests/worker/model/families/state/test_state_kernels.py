"""Models with states by the GPU's kernels: on a GPU, else the layers' steps in Triton's interpreter."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sapwood_common.contract.sampling import SamplingParams
from sapwood_testing.models.same_logits import assert_mixed_steps_equal, tokens_of
from sapwood_testing.models.state_models import STATE
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.core.scheduler.request import Request

pytest.importorskip("triton", reason="Triton is not installed")
kernels = pytest.importorskip("sapwood_kernels.state.triton_steps")

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = {
    "lfm2": {"convolve_gated"}, "lfm2-moe": {"convolve_gated"}, "minimax": {"linear"}, "jamba": {"convolve", "selective"},
    "qwen3-next": {"delta"}, "qwen3.5": {"delta"}, "qwen3.5-moe": {"delta"},
}  # fmt: skip
"""The kernels of a model's steps; the others have those of Mamba 2."""


class Counted:
    """The kernels of steps. Attributes: calls: How often each was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *args):
        self.calls[name] += 1
        return getattr(kernels.TritonStateSteps, name)(*args)


def expected(name):
    return KERNELS.get(name, {"convolve", "space"})


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs whole steps of these models")
@pytest.mark.parametrize("name", STATE)
def test_decodes_by_kernels_equal_transformers(tiny_model, make_runner, make_driver, name):
    tiny = tiny_model(name)
    runner = make_runner(tiny.path)
    runner.ops.state_steps = counted = Counted()
    assert_mixed_steps_equal(make_driver(runner), tiny, 1e-4)
    layers = sum(each is not None for each in runner._model.config.states)
    assert counted.calls == dict.fromkeys(expected(name), 2 * layers), "two steps are decodes alone"


def steps(make_runner, make_driver, path, **options):
    """Logits of a prompt, of a chunk of it with another prompt, and of decodes; and what further decodes chose."""
    driver = make_driver(make_runner(path, **options))
    tokens = [3 + i * 11 % 90 for i in range(70)]
    driver.add(2, tokens)
    driver.add(3, tokens[:41])
    counted = Counted()
    if driver.runner.ops.state_steps is not None:
        driver.runner.ops.state_steps = counted
    parts = [
        driver.runner.logits(driver.output(each)) for each in ({2: 30}, {2: 35, 3: 37}, {2: 1, 3: 1}, {3: 1, 2: 1})
    ]
    chosen = [driver.execute({2: 3, 3: 2})]
    chosen += [driver.execute({2: 1, 3: 1}) for _ in range(20)]
    return torch.cat(parts).cpu(), chosen, driver.runner, counted.calls


@on_gpu
@pytest.mark.parametrize("name", STATE)
def test_a_gpu_computes_states_as_a_cpu_does(tiny_model, make_runner, make_driver, name):
    path = tiny_model(name).path
    wanted, chosen, _, none = steps(make_runner, make_driver, path)
    got, tokens, _, calls = steps(
        make_runner, make_driver, path, device="cuda", dtype="float32", attention_backend="triton"
    )
    assert not none and calls.keys() == expected(name)
    assert float((got - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())
    assert tokens == chosen


@on_gpu
@pytest.mark.parametrize("name", STATE)
def test_captured_decodes_of_states_choose_what_single_launches_do(tiny_model, make_runner, make_driver, name):
    """Three requests, on a graph of four rows: a row of padding changes no state."""
    path = tiny_model(name).path
    options = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "max_step_tokens": 128}
    runners = make_runner(path, **options, cuda_graphs=False), make_runner(path, **options)
    assert runners[0]._graphs is None and runners[1]._graphs is not None
    prompts = {row: tokens_of(10 + row, seed=row) for row in (2, 5, 7)}
    found, states = [], []
    for runner in runners:
        pool = runner._pool.states
        with torch.inference_mode():
            before = pool._states.normal_().clone()  # nothing may write other rows
        driver = make_driver(runner)
        for row, prompt in prompts.items():
            driver.add(row, prompt)
        driver.execute({row: len(prompt) for row, prompt in prompts.items()})
        calls = Counted()
        runner.ops.state_steps = calls
        found.append([driver.execute(dict.fromkeys(order, 1)) for order in ((2, 5, 7), (7, 2, 5), (5,), (7, 2))])
        assert bool(calls.calls) == (runner._graphs is None), "a graph was replayed"
        others = [row for row in range(before.shape[1]) if row not in prompts]
        assert torch.equal(pool._states[:, others], before[:, others])
        states.append(pool._states[:, [2, 5, 7]])
    # Products of padded sizes round otherwise, and a router may then choose another expert.
    pairs = [(one[row], other[row]) for one, other in zip(*found, strict=True) for row in one]
    assert sum(one == other for one, other in pairs) >= 0.7 * len(pairs)
    if all(one == other for one, other in pairs):
        assert float((states[0] - states[1]).norm() / states[0].norm()) < 0.05


@on_gpu
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "nemotron-h", "minimax", "jamba"])
def test_requests_continue_from_snapshots_of_captured_decodes(tiny_model, make_runner, name):
    """A second turn, whose beginning is the text and the output of the first, gets the text that it gets without a cache."""
    # With numbers of 16 bits a prompt and decodes choose otherwise where two tokens are nearly as likely.
    options = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", "max_step_tokens": 128}
    runner = make_runner(tiny_model(name).path, page_size=16, num_pages=256, **options)
    assert runner._graphs is not None
    states, saved = runner._pool.states, []
    save = states.save
    states.save = lambda *args: (saved.append(args), save(*args))
    cached, plain = scheduler_for(runner.info), scheduler_for(runner.info, prefix_cache=False)
    prompt = tokens_of(40, seed=3)
    first = generate(cached, runner, 0, prompt, 50)
    assert saved, "a captured step has taken a snapshot"
    again = [*prompt, *first, *tokens_of(9, seed=4)]
    continued = generate(cached, runner, 1, again, 20)
    assert cached.load().cached_tokens >= 64
    without = generate(plain, runner, 2, again, 20)
    assert sum(one == other for one, other in zip(continued, without, strict=True)) >= 14


def generate(scheduler, runner, serial, prompt, count):
    scheduler.add(
        Request(serial, str(serial), prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    )
    output = []
    while scheduler.has_work:
        step = scheduler.schedule()
        for each in scheduler.update(runner.execute(step)) if step else ():
            assert each.finish_reason != "error", each.error
            output += each.token_ids
    return output
