"""A KV cache of float8: its scales, what it costs in accuracy, and its way through the tiers."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.worker.steps import Part, step_for
from sapwood_worker.model.pools.device_pool import DevicePool, KVScales
from sapwood_worker.model.pools.host_pool import HostPool
from sapwood_worker.model.pools.torch_transfer import make_transfer
from sapwood_worker.model.runner.kv_calibration import scale_for
from sapwood_worker.model.runner.model_runner import ModelRunner
from sapwood_worker.records.kv_layout import KVComponent, KVLayout
from sapwood_worker.records.step import Copies, PageCopy, Step

PROMPT = [3 + i * 7 % 90 for i in range(60)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def runners(request, tiny_model, make_runner):
    path = tiny_model(request.param).path
    return make_runner(path), make_runner(path, kv_cache_dtype="fp8_e4m3")


def step(runner: ModelRunner, tokens: list[int], start: int) -> Step:
    request = Part(0, tokens, start, True, SamplingParams(temperature=0.0))
    return step_for(runner.info, 0, np.arange(8, dtype=np.int32).reshape(1, 8), [request])


def test_logits_stay_close_to_those_of_a_whole_cache(runners):
    whole, small = (runner.logits(step(runner, PROMPT, 0)) for runner in runners)
    error = float((small - whole).norm() / whole.norm())
    assert (
        0 < error < 0.3
    )  # random weights make much of little differences; the demo model's figures are in docs/design/figures-gpu.md


def test_a_prompt_in_chunks_gives_what_it_gives_at_once(runners):
    runner = runners[1]
    at_once = runner.logits(step(runner, PROMPT, 0))
    parts = [
        runner.logits(step(runner, PROMPT[:40], 0)),
        runner.logits(step(runner, PROMPT[40:59], 40)),
        runner.logits(step(runner, PROMPT[59:], 59)),
    ]
    # A last bit of a key or value may decide which way it is rounded.
    torch.testing.assert_close(torch.cat(parts), at_once, rtol=0.02, atol=0.02)


def test_pages_take_a_quarter_and_are_not_exchanged_with_others(runners):
    whole, small = runners
    assert small.cache_identity() != whole.cache_identity()


@pytest.mark.parametrize(
    ("largest", "scale"), [(0.0, 1.0), (5.0, 1.0), (224.0, 1.0), (900.0, 32.0), (0.06, 2.0**-9), (float("inf"), 1.0)]
)
def test_only_a_layer_of_very_large_or_small_numbers_is_scaled(largest: float, scale: float):
    assert scale_for(largest) == scale


def test_pages_of_two_groups_come_back_from_the_host_as_they_went():
    float8, wide = KVComponent((0, 2), 2, 2, 8, "float8_e4m3fn"), KVComponent((1,), 1, 1, 24, "float32", needed=8)
    layout = KVLayout((float8, wide), page_size=4)
    pool = DevicePool(layout, 6, torch.device("cpu"), KVScales((1.0, 1.0, 2.0), (0.5, 1.0, 1.0)))
    for pages in pool.pages.values():
        pages.view(torch.uint8).random_(256)
    before = {layer: pages.view(torch.uint8).clone() for layer, pages in pool.pages.items()}
    assert layout.page_bytes == 2 * (2 * 2 * 4 * 8) + 4 * 24 * 4
    transfer = make_transfer(pool, HostPool(4, layout.page_bytes), device_ops("cpu"))
    pages, host = np.array([5, 1], np.int32), np.array([2, 0], np.int32)
    windows = np.array([0, 3], np.int32)
    transfer.start(Copies(store=PageCopy(0, pages, host, (windows,))))
    for content in pool.pages.values():
        content.view(torch.uint8).zero_()
    # Of the window only the second page is wanted.
    transfer.start(Copies(load=PageCopy(1, pages, host, (np.array([-1, 3], np.int32),))))
    for layer, content in pool.pages.items():
        now, loaded = content.view(torch.uint8), [3] if layer == 1 else [5, 1]
        assert torch.equal(now[loaded], before[layer][loaded])
        assert not now[[page for page in range(6) if page not in loaded]].any()


def with_kv_scales(path, to, names: dict[str, torch.Tensor]):
    to = shutil.copytree(path, to)
    save_file(load_file(to / "model.safetensors") | names, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("key", "value"),
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
)
def test_scales_that_a_checkpoint_stores_are_taken(tiny_model, make_runner, tmp_path, key: str, value: str):
    place = "model.layers.1.self_attn."
    names = {place + key: torch.tensor([0.37]), place + value: torch.tensor(0.11)}
    path = with_kv_scales(tiny_model("llama").path, tmp_path / "scaled", names)
    runner = make_runner(path, kv_cache_dtype="fp8_e4m3")
    scales = runner._pool.scales
    assert scales.of(1) == (pytest.approx(0.37), pytest.approx(0.11))
    assert scales.of(0) == make_runner(tiny_model("llama").path, kv_cache_dtype="fp8_e4m3")._pool.scales.of(0)
    logits, whole = runner.logits(step(runner, PROMPT, 0)), make_runner(path)
    expected = whole.logits(step(whole, PROMPT, 0))
    assert 0 < float((logits - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize("scale", [torch.tensor(-1.0), torch.ones(2)])
def test_scales_that_are_no_scales_are_named(tiny_model, make_runner, tmp_path, scale: torch.Tensor):
    names = {f"model.layers.1.self_attn.{kind}_scale": scale.clone() for kind in "kv"}
    path = with_kv_scales(tiny_model("llama").path, tmp_path / "scaled", names)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.k_scale .*one scale, above 0"):
        make_runner(path)
