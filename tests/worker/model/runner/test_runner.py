"""The runner as the scheduler sees it: steps in, sampled tokens out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.steps import Part, make_step, step_for
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.forward_batch import build_forward_batch
from sapwood_worker.model.runner.options import RunnerOptions

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def runner(tiny_model, make_runner):
    return make_runner(tiny_model("gemma3").path)


def test_only_requests_that_sample_get_a_token(runner, make_driver):
    driver = make_driver(runner)
    driver.add(0, [3, 4, 5, 6, 7, 8])
    driver.add(1, [9, 10, 11])
    driver.add(2, [12] * 20)
    result = runner.execute(driver.output({0: 4, 1: 3, 2: 19}))
    assert result.step == 1
    assert result.token_ids[0] == result.token_ids[2] == []
    (token,) = result.token_ids[1]
    assert 0 <= token < 97


def test_a_step_that_samples_nothing_and_an_empty_step(runner, make_driver):
    driver = make_driver(runner)
    driver.add(0, [3] * 10)
    assert runner.execute(driver.output({0: 5})).token_ids == [[]]
    assert runner.execute(step_for(runner.info, 8, driver.table, [])).token_ids == []


def test_layers_without_experts_have_nothing_to_tell_of_any(tiny_model, make_runner):
    """As for a pipeline's first stage whose layers are all dense: the scheduler is not to ask it."""
    dense = make_runner(tiny_model("qwen3-moe-plain", mlp_only_layers=[0, 1, 2, 3]).path)
    assert dense.experts is None
    some = make_runner(tiny_model("qwen3-moe-plain").path)
    assert some.experts is not None and some.experts()() == [[0] * 8] * 2


def test_greedy_and_sampled_requests_share_a_batch(runner, make_driver):
    prompts = {slot: [3 + slot, 20, 40 + slot] for slot in range(6)}
    settings = {slot: GREEDY if slot % 2 else SamplingParams(temperature=1.5, seed=slot) for slot in prompts}
    together = make_driver(runner).generate(prompts, 12, settings)
    for slot, prompt in prompts.items():
        alone = make_driver(runner).generate({slot: prompt}, 12, settings)
        assert alone[slot] == together[slot]
    assert make_driver(runner).generate(prompts, 12, GREEDY)[0] != together[0]


def test_a_sampled_request_resumed_from_its_prefix_goes_on_alike(runner, make_driver):
    setting = SamplingParams(temperature=1.2, top_p=0.95, seed=77)
    prompt = [5, 6, 7]
    whole = make_driver(runner).generate({0: prompt}, 16, setting)[0]
    for cut in (1, 5, 11):
        rest = make_driver(runner).generate({4: prompt + whole[:cut]}, 16 - cut, setting)[4]
        assert whole[:cut] + rest == whole


def test_drafts_checked_in_one_step_give_the_tokens_of_one_by_one(runner, make_driver):
    setting = SamplingParams(temperature=1.2, top_p=0.95, seed=77, frequency_penalty=0.4)
    prompts = {0: [5, 6, 7], 1: [40, 41], 2: [9] * 20}
    wanted = make_driver(runner).generate(prompts, 24, setting)
    driver = make_driver(runner)
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
    driver.execute({slot: len(prompt) for slot, prompt in prompts.items()}, setting)
    taken = []
    for turn in range(6):
        parts = []
        for slot, prompt in prompts.items():
            known = driver.tokens[slot]
            draft = wanted[slot][len(known) - len(prompt) :][: (slot + turn) % 4]
            if turn % 2 and len(draft) > 1:
                draft[1] = (draft[1] + 1) % 97
            parts.append(Part(slot, [known[-1], *draft], len(known) - 1, 1 + len(draft), setting, enters=False))
        for slot, tokens in enumerate(runner.execute(step_for(runner.info, turn, driver.table, parts)).token_ids):
            driver.tokens[slot] += tokens
            taken.append(len(tokens))
    for slot, prompt in prompts.items():
        got = driver.tokens[slot][len(prompt) :]
        assert got == wanted[slot][: len(got)]
    assert {1, 2, 4} <= set(taken)


def test_masks_are_waited_for_only_once_the_model_has_been_launched(runner, make_driver, monkeypatch):
    events, forward = [], runner._forward

    class Late:
        def result(self):
            events.append("masks")
            return np.array([[1 << 5, 0, 0, 0]], np.int32)

    driver = make_driver(runner)
    driver.add(0, [3, 4])
    driver.add(1, [5, 6])
    step = driver.output({0: 2, 1: 2})
    step.masked, step.masks = np.array([1]), Late()
    monkeypatch.setattr(runner, "_forward", lambda batch: (events.append("model"), forward(batch))[1])
    first, second = runner.execute(step).token_ids
    assert events == ["model", "masks"]
    assert second == [5]
    assert first == make_driver(runner).generate({0: [3, 4]}, 1)[0]


def test_on_a_gpu_a_decode_a_prompt_and_drafts_are_computed_before_the_first_request(
    tiny_model, make_runner, monkeypatch
):
    planned, plan = [], PagedAttention.plan
    monkeypatch.setattr(PagedAttention, "plan", lambda self, batch: (planned.append(batch), plan(self, batch))[1])
    monkeypatch.setattr(CpuOps, "asynchronous", True)
    make_runner(tiny_model("gemma3").path)
    drafts = [[1], [4], [1, 1], [8, 8]]  # greedy, drawn, and with penalties
    assert [np.diff(batch.query_starts).tolist() for batch in planned] == [[1, 2], *drafts, *drafts, *drafts]


def test_pages_of_other_requests_are_left_alone(runner, make_driver):
    driver = make_driver(runner)
    driver.add(0, [3, 4, 5, 6, 7])
    driver.execute({0: 5})
    before = runner._pool.pages[2].clone()
    driver.add(1, [8] * 40)
    driver.execute({1: 40})
    own = driver.table[1, :3].tolist()
    others = [page for page in range(runner.info.num_pages) if page not in own]
    assert torch.equal(before[others].nan_to_num(), runner._pool.pages[2][others].nan_to_num())


def test_prefix_pages_shared_by_two_requests_serve_both(runner, make_driver):
    driver = make_driver(runner)
    prefix = [3 + i % 90 for i in range(32)]
    driver.add(0, [*prefix, 11, 12])
    driver.execute({0: 34})
    driver.add(1, [*prefix, 50, 51, 52])
    driver.table[1, :2] = driver.table[0, :2]
    driver.cached[1] = 32
    shared = driver.execute({1: 3})[1]
    assert shared == make_driver(runner).generate({7: [*prefix, 50, 51, 52]}, 1)[7][0]


@pytest.mark.parametrize(
    "setting",
    [
        GREEDY,
        SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=4),
        SamplingParams(temperature=1.0, presence_penalty=1.0, logprobs=3, seed=4),
    ],
    ids=["greedy", "sampled", "penalised"],
)
def test_a_request_whose_logits_are_not_numbers_fails_alone(tiny_model, make_runner, make_driver, setting):
    broken = make_runner(tiny_model("llama").path)
    embedding = broken._model.embedding.table.method.weight
    embedding[6] = float("nan")
    driver = make_driver(broken)
    prompts = {0: [3, 4], 1: [5, 6], 2: [7, 8]}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
    result = broken.execute(driver.output({0: 2, 1: 2, 2: 2}, setting))
    good = make_driver(broken).generate({0: [3, 4], 2: [7, 8]}, 1, setting)
    assert result.token_ids == [good[0][:1], [-1], good[2][:1]]
    assert 1 not in result.logprobs


def test_info_describes_model_and_pool(tiny_model):
    path = tiny_model("llama").path
    info = build_runner(RunnerOptions(model_path=path, num_pages=40, page_size=8, max_running=4, threads=1)).info
    assert (info.architecture, info.dtype, info.vocab_size, info.eos_token_ids) == ("llama", "float32", 97, (2,))
    assert (info.page_size, info.num_pages, info.context_length) == (8, 40, 320)
    limited = RunnerOptions(model_path=path, num_pages=40, page_size=8, context_length=100, max_running=4, threads=1)
    assert build_runner(limited).info.context_length == 100


def test_pool_is_sized_by_bytes(tiny_model):
    # 4 layers, keys and values, 2 heads of 16 float32: 1024 bytes a token.
    options = RunnerOptions(
        model_path=tiny_model("llama").path, kv_cache_bytes=1 << 20, page_size=16, max_running=4, threads=1
    )
    assert build_runner(options).info.num_pages == 64


def test_pool_too_small_for_the_running_requests_is_refused(tiny_model):
    options = RunnerOptions(model_path=tiny_model("llama").path, num_pages=7, max_running=8, threads=1)
    with pytest.raises(ConfigError, match="7 pages of 16 tokens, fewer than the 8 requests"):
        build_runner(options)


@pytest.mark.parametrize("size", [{"kv_cache_bytes": 1 << 50}, {"num_pages": 1 << 36}])
def test_a_pool_too_large_for_the_memory_is_refused(tiny_model, size):
    """Linux gives it to a process that asks, and kills one that writes to it."""
    options = RunnerOptions(model_path=tiny_model("llama").path, page_size=16, max_running=4, threads=1, **size)
    with pytest.raises(
        ConfigError, match=r"KV cache of \d+\.\d GiB does not fit in the .* free: give --kv-cache-gb or"
    ):
        build_runner(options)


def test_forward_batch_is_flat_and_finds_slots_through_the_page_table():
    table = np.array([[5, 2, 9], [7, 1, 0]], np.int32)
    requests = [
        Part(1, [10, 11, 12], 3, False, GREEDY),
        Part(0, [20], 8, True, GREEDY),
    ]
    batch = build_forward_batch(make_step(0, table, requests), 4, device_ops("cpu"))
    assert batch.token_ids.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [3, 4, 5, 8]
    assert batch.attention.cache_slots.tolist() == [7 * 4 + 3, 1 * 4, 1 * 4 + 1, 9 * 4]
    assert batch.attention.query_starts.tolist() == [0, 3, 4]
    assert batch.attention.seq_lens.tolist() == [6, 9]


def test_without_flags_a_runner_says_what_it_chose_and_why(tiny_model) -> None:
    path = tiny_model("llama").path
    info = build_runner(RunnerOptions(model_path=path, max_running=None, max_step_tokens=None, threads=1)).info
    assert (info.max_running, info.max_step_tokens) == (64, 512)
    assert info.sizes_reason.startswith(
        "max_running 64: as measured on CPUs; max_step_tokens 512: as measured on CPUs; KV cache: "
    )
    given = RunnerOptions(model_path=path, num_pages=40, max_running=4, max_step_tokens=24, threads=1)
    assert build_runner(given).info.sizes_reason == "max_running 4 given; max_step_tokens 24 given; KV cache: given"
