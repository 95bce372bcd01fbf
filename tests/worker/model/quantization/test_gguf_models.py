"""Models whose weights are multiplied as GGUF files store them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_kernels.native import products
from sapwood_kernels.native.products import load_library, processor
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.factory import device_ops
from sapwood_kernels.quantised.grouped import GroupedWeight, dequantise
from sapwood_testing.models.gguf_files import write_gguf
from sapwood_testing.worker.thread_ranks import ThreadGroup
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.loader import load_model

compiled = pytest.mark.skipif(load_library() is None, reason="the kernel is not compiled: python hatch_build.py")

NEAR = {"float32": 2e-5, "head in whole numbers": 1e-4}
PROMPT = [3 + i * 7 % 90 for i in range(40)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
# The types that the gguf package can write, and one matrix in float32: its layer is read as numbers.
KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q4_1", "ffn_gate": "Q5_1", "ffn_up": "Q5_0",
    "token_embd": "Q8_0", "output": "Q4_0",
}  # fmt: skip


@pytest.fixture
def path(tiny_model, tmp_path):
    """Makes a GGUF file of a tiny model whose matrices are quantised."""

    def make(name: str, **more_kinds: str) -> Path:
        model = tiny_model(name, **SIZES).oracle
        return write_gguf(tmp_path / f"{name}.gguf", model, name, kinds=KINDS | more_kinds)

    return make


def load(path: Path, **options):
    return load_model(path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0, **options)


def logits(make_runner, make_driver, path: Path, **options) -> torch.Tensor:
    driver = make_driver(make_runner(path, **options))
    driver.add(0, PROMPT)
    return torch.cat([driver.runner.logits(driver.output({0: count})) for count in (36, 1, 3)])


@pytest.fixture(params=NEAR)
def near(request, monkeypatch) -> float:
    """How near products are to those of float32 numbers, with an output head in float32 and in whole numbers."""
    if request.param == "float32" and processor() == "AVX512":
        monkeypatch.setattr(products, "processor", lambda: "AVX2")
    elif request.param != "float32" and processor() != "AVX512":
        pytest.skip("there are no products in whole numbers for this processor")
    return NEAR[request.param]


@compiled
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_logits_are_those_of_the_float32_numbers(make_runner, make_driver, path, name, near):
    file = path(name)
    kept = logits(make_runner, make_driver, file)
    wide = logits(make_runner, make_driver, file, stored_weights="widen")
    assert not torch.equal(kept, wide)  # sums of another order
    assert (kept - wide).abs().max() <= near * wide.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_where_kernels_read_groups_they_have_the_file_s_numbers(make_runner, make_driver, path, name, monkeypatch):
    file = path(name)
    wide = logits(make_runner, make_driver, file, stored_weights="widen")
    monkeypatch.setattr(CpuOps, "multiplies_groups", True)
    loaded = load(file)
    assert loaded.quantization == "gguf as stored"
    held = [name for name, slot in loaded.model.weights().items() if slot.filled]
    assert not held  # the file may go
    kept = logits(make_runner, make_driver, file)
    assert not torch.equal(kept, wide)
    assert (kept - wide).abs().max() <= 2e-5 * wide.abs().max()


def test_a_rank_has_its_part_of_the_groups(path, monkeypatch):
    monkeypatch.setattr(CpuOps, "multiplies_groups", True)
    made: list[list[GroupedWeight]] = []
    monkeypatch.setattr(CpuOps, "grouped", lambda self, weight: made[-1].append(weight))
    file = path("llama", attn_v="Q4_1")  # no two neighbours are laid out alike, and become one weight
    for rank in (None, 0, 1):
        parallel = (
            Parallel() if rank is None else Parallel(tp=ThreadGroup(rank, [torch.empty(0)] * 2, threading.Barrier(2)))
        )
        made.append([])
        load(file, parallel=parallel)
    whole, *parts = ([dequantise(weight) for weight in weights] for weights in made)
    assert len(whole) == len(parts[0]) == len(parts[1]) > 6
    columns = 0
    for all_, first, second in zip(whole, *parts, strict=True):
        dim = int(first.shape[1] < all_.shape[1])
        columns += dim
        assert torch.equal(torch.cat((first, second), dim), all_)
    assert columns


@compiled
def test_weights_are_the_file_s_bytes_mapped_once(path):
    file = path("qwen2")
    loaded = load(file)
    assert loaded.quantization == "gguf as stored"
    held = [slot.target for slot in loaded.model.weights().values() if slot.filled]
    assert len(held) == 2 + 6 * loaded.config.num_layers  # embedding and head; q, k, v, o, gate, up: down is float32
    ends = [int(each, 16) for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(file.name) for each in line.split(maxsplit=1)[0].split("-")]  # fmt: skip
    for blocks in held:
        assert any(low <= blocks.data_ptr() < high for low, high in zip(ends[::2], ends[1::2], strict=True))
    assert load(file, stored_weights="widen").quantization == "none"


@compiled
def test_a_rank_has_its_part_of_the_bytes(path):
    # Llama's queries and keys are in another order in the file.
    file = path("llama")
    whole = load(file).model.weights()
    filled = 0
    for rank in range(2):
        parallel = Parallel(tp=ThreadGroup(rank, [torch.empty(0)] * 2, threading.Barrier(2)))
        for name, slot in load(file, parallel=parallel).model.weights().items():
            if slot.filled:
                filled += 1
                rows, columns = whole[name].target[slot.index[0]], slot.index[1]
                width = rows.shape[1] * (columns.stop - columns.start) // slot.shape[1]
                first = rows.shape[1] * columns.start // slot.shape[1]
                assert torch.equal(slot.target, rows[:, first : first + width]), name
    assert filled


@compiled
def test_a_quantization_that_would_change_nothing_is_refused(path):
    with pytest.raises(ConfigError, match=r"--quantization fp8 would change nothing.*gguf.*--stored-weights"):
        load(path("llama", ffn_down="Q8_0"), quantization="fp8")


@compiled
def test_the_cache_s_identity_tells_whether_weights_are_kept(make_runner, path):
    file = path("qwen2")
    identities = {make_runner(file, stored_weights=each).cache_identity() for each in ("keep", "widen")}
    assert len(identities) == 2


def test_without_the_kernel_weights_are_widened(monkeypatch, caplog, path):
    monkeypatch.setattr("sapwood_kernels.native.products.library_name", lambda capability: "sapwood.none.so")
    assert load(path("qwen2")).quantization == "none"
    assert "GGUF weights are widened as they are loaded" in caplog.text
