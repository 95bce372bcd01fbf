"""Calls that were recorded, run again, against the same calls made one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood_kernels.native import steps
from sapwood_kernels.native.products import GgufProduct, load_library
from sapwood_kernels.native.steps import Recording
from sapwood_testing.models.gguf_blocks import blocks

pytestmark = pytest.mark.skipif(load_library() is None, reason="nothing is compiled: python hatch_build.py")
WIDTH = 512


@pytest.fixture(scope="module")
def library():
    return load_library()


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def layers(library) -> Callable[[Tensor], Tensor]:
    """Twelve layers of products, norms and sums in place."""
    norm = steps.norm(library, torch.rand(WIDTH), 1e-6)
    weight = torch.rand(WIDTH)
    up = GgufProduct(library, [("Q5_0", blocks("Q5_0", 640, WIDTH, 1)), ("Q4_K", blocks("Q4_K", 384, WIDTH, 2))], WIDTH)
    down = GgufProduct(library, [("Q8_0", blocks("Q8_0", WIDTH, WIDTH, 3))], WIDTH)

    def compute(x: Tensor) -> Tensor:
        for _ in range(12):
            x += norm(down(up(x, norm=(weight, 1e-6), gate="silu")))
        return x

    return compute


@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_a_run_again_gives_what_the_calls_give_for_its_inputs(library, layers, threads, tokens):
    first = torch.randn(tokens, WIDTH)
    recording = Recording(library)
    expected = layers(first.clone())
    with recording.record([first.data_ptr()]):
        layers(first)
    assert recording.refused is None
    assert torch.equal(first, expected)
    assert len(recording) == 12 * 4
    for _ in range(4):
        other = torch.randn(tokens, WIDTH)
        expected = layers(other.clone())
        recording.run([other.data_ptr()], {})
        assert torch.equal(other, expected)


def test_attention_of_other_pages_and_lengths(library, threads):
    keys, values = torch.randn(2, 40, 16, 2, 32).unbind()
    attention = steps.DecodeAttention(library, keys, values, 4, 0.2, None, False, None, None)
    query, out = torch.randn(2, 4, 32), torch.empty(2, 4, 32)
    pages, lengths = np.arange(40, dtype=np.int32).reshape(2, 20), np.array([70, 5])
    recording = Recording(library)
    with recording.record([pages.ctypes.data, lengths.ctypes.data]):
        attention(query, pages, lengths, out)
    wider, longer = np.arange(40, dtype=np.int32)[::-1].reshape(2, 20).copy()[:, :9], np.array([3, 144])
    attention(query, wider, longer, expected := torch.empty(2, 4, 32))
    recording.run([wider.ctypes.data, longer.ctypes.data], {0: wider.strides[0] // 4})
    assert torch.equal(out, expected)


def test_freed_memory_serves_later_tensors_of_the_recording(library):
    recording = Recording(library)
    norm = steps.norm(library, torch.rand(WIDTH), 1e-6)
    x, places = torch.randn(1, WIDTH), set()
    with recording.record([x.data_ptr()]):
        for _ in range(20):
            part = norm(x)
            places.add(part.data_ptr())
            x += part
            del part
    assert len(places) == 1


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (lambda x: x * 2.0, "aten.mul"),
        (lambda x: x.add_(torch.ones(WIDTH)), "aten."),
        (lambda x: x.add_(x, alpha=2.0), "aten.add_"),
        (lambda x: x.zero_(), "aten.zero_"),
        (lambda x: x.t().contiguous(), "aten."),
    ],
)
def test_what_torch_computes_is_named_and_still_computed(library, compute, named):
    x, recording = torch.randn(2, WIDTH), Recording(library)
    expected = compute(x.clone())
    with recording.record([x.data_ptr()]):
        got = compute(x)
    assert torch.equal(got, expected)
    assert recording.refused is not None and named in recording.refused


def test_a_function_that_is_not_recorded_is_named(library):
    table = GgufProduct(library, [("Q8_0", blocks("Q8_0", 40, WIDTH))], WIDTH)
    recording = Recording(library)
    with recording.record([]):
        table.rows(torch.tensor([3, 4]))
    assert recording.refused == "rows"


def test_recording_imports_no_compiler():
    code = """
import sys, torch
from sapwood_kernels.native.products import load_library
from sapwood_kernels.native.steps import Recording
x = torch.ones(4)
with Recording(load_library()).record([x.data_ptr()]):
    x.add_(x)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
