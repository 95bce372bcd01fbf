"""What is computed in C between products against the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.kv_destination import KVDestination
from sapwood_kernels.native.products import SMALL, GgufProduct, NativeLibrary, load_library
from sapwood_kernels.native.steps import DecodeAttention
from sapwood_kernels.ops.cpu import CpuOps
from sapwood_kernels.ops.device import DeviceOps
from sapwood_testing.models.gguf_blocks import blocks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    found = load_library()
    if found is None:
        pytest.skip("nothing is compiled: python hatch_build.py")
    return found


@pytest.mark.parametrize("shape", [(1, 640), (40, 256), (3, 2, 37), (0, 64)])
def test_norms(library, shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    got = CpuOps(CPU).rms_norm(weight, 1e-6, torch.float32)(x)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6), rtol=2e-6, atol=1e-6)


def test_a_norm_of_rows_that_lie_apart(library):
    x, weight = torch.randn(5, 80)[:, :32], torch.randn(32)
    got = CpuOps(CPU).rms_norm(weight, 1e-6, torch.float32)(x)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 3, SMALL])
@pytest.mark.parametrize("rows", [32, 33])  # whole vectors, and some numbers more
def test_products_with_a_norm_before_and_a_gate_after(library, gate, tokens, rows):
    product = GgufProduct(library, [("Q8_0", blocks("Q8_0", rows, 640, n)) for n in (1, 2)], 640)
    x, weight = torch.randn(tokens, 640) * 2, torch.randn(640)
    apart = product(reference.rms_norm(x, weight, 1e-6))
    wanted = (reference.silu_mul if gate == "silu" else reference.gelu_tanh_mul)(apart)
    assert (product(x, norm=(weight, 1e-6), gate=gate) - wanted).norm() <= 1e-6 * wanted.norm()


def test_gates_of_numbers_of_any_size(library):
    product = GgufProduct(library, [("Q8_0", blocks("Q8_0", 32, 32, n)) for n in (1, 2)], 32)
    x = torch.randn(20, 32) * torch.logspace(-6, 12, 20)[:, None]
    wanted = reference.gelu_tanh_mul(product(x).double()).float()  # 1 + tanh loses all of its digits in float32
    torch.testing.assert_close(product(x, gate="gelu_tanh"), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_heads_are_normed_rotated_and_stored(library, normed, order, tokens):
    heads, kv_heads, dim, page = 6, 2, 64, 16
    norm = (torch.randn(dim), torch.randn(dim), 1e-6) if normed else None
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = torch.randn(tokens, 1, dim), torch.randn(tokens, 1, dim)
    slots = torch.randperm(8 * page)[:tokens]

    def stored(ops: DeviceOps) -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.zeros((8, 2, page, kv_heads, dim) if order == "NHD" else (8, 2, kv_heads, page, dim))
        keys, values = (pages[:, n] if order == "NHD" else pages[:, n].transpose(1, 2) for n in (0, 1))
        store = ops.store_heads(heads, kv_heads, norm, torch.float32)
        return store(qkv, cos, sin, KVDestination(keys, values, slots)), pages

    for got, wanted in zip(stored(CpuOps(CPU)), stored(DeviceOps(CPU)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (8, 8)])
@pytest.mark.parametrize(
    "window, chunked, softcap, sinks",
    [(None, False, None, False), (100, False, None, False), (100, True, None, False), (None, False, 5.0, True)],
)
@pytest.mark.parametrize("dim", [48, 256])
def test_decodes_attend_to_what_the_cache_has_of_their_requests(library, heads, window, chunked, softcap, sinks, dim):
    page, lengths = 16, [1, 17, 64, 700, 1500]
    query = torch.randn(len(lengths), heads[0], dim)
    pages = torch.randn(150, 2, page, heads[1], dim)
    table = np.random.default_rng(0).permutation(150)[: 94 + 46 + 5 + 3].astype(np.int32)
    rows = np.full((len(lengths), 200), -1, np.int32)  # what is behind a request's last page is not read
    at = 0
    for row, length in zip(rows, lengths, strict=True):
        count = -(-length // page)
        row[:count] = table[at % 50 : at % 50 + count]
        at += count
    sink = torch.randn(heads[0]) if sinks else None
    attention = DecodeAttention(library, pages[:, 0], pages[:, 1], heads[0], dim**-0.5, window, chunked, softcap, sink)
    out = torch.empty_like(query)
    attention(query, rows, np.array(lengths), out)
    for n, length in enumerate(lengths):
        mine = pages[torch.from_numpy(rows[n, : -(-length // page)].astype(np.int64))].transpose(0, 1).flatten(1, 2)
        wanted = reference.attention(
            query[n : n + 1],
            mine[0, :length],
            mine[1, :length],
            scale=dim**-0.5,
            window=window,
            chunked=chunked,
            softcap=softcap,
            sinks=sink,
        )
        torch.testing.assert_close(out[n : n + 1], wanted, rtol=1e-4, atol=1e-5)
