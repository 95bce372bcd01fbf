"""Pages copied between device and host land where they should, and nothing else changes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sapwood_kernels import reference

P, Q, LAYERS, S, K, D = 7, 5, 3, 4, 2, 6


def pools() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys, values = ([torch.randn(P, S, K, D, generator=generator) for _ in range(LAYERS)] for _ in range(2))
    # Rows further apart than they are long, as in the host pool.
    host = torch.randn(Q, LAYERS * 2 * S * K * D + 8, generator=generator)[:, 8:].view(Q, LAYERS, 2, S, K, D)
    return keys, values, host


def test_a_store_copies_each_page_to_its_place() -> None:
    keys, values, host = pools()
    before = host.clone()
    device_pages, host_pages = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0])
    for layer in range(LAYERS):
        reference.store_pages(keys[layer], values[layer], host, layer, device_pages, host_pages)
    for layer in range(LAYERS):
        for device, to in zip([6, 0, 3], [1, 4, 0], strict=True):
            assert torch.equal(host[to, layer, 0], keys[layer][device])
            assert torch.equal(host[to, layer, 1], values[layer][device])
    assert torch.equal(host[[2, 3]], before[[2, 3]])


def test_a_load_brings_back_what_was_stored() -> None:
    keys, values, host = pools()
    wanted = [(keys[layer].clone(), values[layer].clone()) for layer in range(LAYERS)]
    pages, places = torch.tensor([2, 5]), torch.tensor([3, 1])
    for layer in range(LAYERS):
        reference.store_pages(keys[layer], values[layer], host, layer, pages, places)
        keys[layer][pages] = 0
        values[layer][pages] = 0
        reference.load_pages(keys[layer], values[layer], host, layer, pages, places)
        assert torch.equal(keys[layer], wanted[layer][0])
        assert torch.equal(values[layer], wanted[layer][1])


TRITON = """
import torch
from sapwood_kernels import reference, triton_page_copy

generator = torch.Generator().manual_seed(1)
for dtype, s, k, d in ((torch.float32, 4, 2, 6), (torch.bfloat16, 16, 8, 128), (torch.float16, 1, 1, 2)):
    p, q, layers = 7, 5, 3
    keys, values = ([torch.randn(p, s, k, d, generator=generator).to(dtype) for _ in range(layers)] for _ in range(2))
    host = torch.randn(q, layers * 2 * s * k * d + 64, generator=generator).to(dtype)[:, 64:].view(q, layers, 2, s, k, d)
    wide = torch.zeros(q, layers * 2 * s * k * d + 64, dtype=dtype)[:, 64:].view(q, layers, 2, s, k, d)
    wide.copy_(host)
    pages, places = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0])
    for layer in range(layers):
        reference.store_pages(keys[layer], values[layer], host, layer, pages, places)
        triton_page_copy.store_pages(keys[layer], values[layer], wide, layer, pages, places)
    assert torch.equal(host, wide)
    others = torch.tensor([1, 2])
    for layer in range(layers):
        mine, theirs = (keys[layer].clone(), values[layer].clone()), (keys[layer], values[layer])
        triton_page_copy.load_pages(*mine, wide, layer, others, places[:2])
        reference.load_pages(*theirs, host, layer, others, places[:2])
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    pools = [each for pair in zip(keys, values) for each in pair]
    addresses = torch.tensor([pool.data_ptr() for pool in pools])
    staged = torch.zeros(3, 2 * layers, s * k * d * dtype.itemsize // 4, dtype=torch.int32)
    triton_page_copy.gather_pages(addresses, staged, pages)
    assert torch.equal(staged.view(dtype).view(3, layers, 2, s, k, d), torch.stack(
        [torch.stack([pool[pages] for pool in (keys[i], values[i])], 1) for i in range(layers)], 1))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_equal_the_reference_in_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "compare.py"
    script.write_text(TRITON)
    result = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "equal", result.stderr
