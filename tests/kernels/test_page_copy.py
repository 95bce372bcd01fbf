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

P, Q, N = 7, 5, 96


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randint(256, (P, N), generator=generator).to(torch.uint8)
    # Rows further apart than they are long, as in the host pool.
    host = torch.randint(256, (Q, 3 * N), generator=generator).to(torch.uint8)[:, N : 2 * N]
    return pages, host


def test_a_store_copies_each_page_to_its_place() -> None:
    pages, host = pools()
    before = host.clone()
    reference.store_pages(pages, host, torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0]))
    for device, to in zip([6, 0, 3], [1, 4, 0], strict=True):
        assert torch.equal(host[to], pages[device])
    assert torch.equal(host[[2, 3]], before[[2, 3]])


def test_a_load_brings_back_what_was_stored() -> None:
    pages, host = pools()
    wanted = pages.clone()
    there, here = torch.tensor([2, 5]), torch.tensor([3, 1])
    reference.store_pages(pages, host, there, here)
    pages[there] = 0
    reference.load_pages(pages, host, there, here)
    assert torch.equal(pages, wanted)


def test_a_copy_within_a_pool_changes_its_targets_only() -> None:
    pages, _ = pools()
    wanted = pages.clone()
    wanted[2], wanted[5] = pages[6], pages[6]
    reference.copy_pages(pages, torch.tensor([6, 6]), torch.tensor([2, 5]))
    assert torch.equal(pages, wanted)


TRITON = """
import torch
from sapwood_kernels import reference, triton_page_copy

generator = torch.Generator().manual_seed(1)
for dtype, shape in ((torch.float32, (2, 2, 4, 6)), (torch.bfloat16, (2, 8, 16, 128)), (torch.float16, (1, 1, 1, 2))):
    p, q, layers = 7, 5, 3
    pools = [torch.randn(p, *shape, generator=generator).to(dtype) for _ in range(layers)]
    flat = [pool.view(torch.uint8).flatten(1) for pool in pools]
    size = flat[0].shape[1]
    host = torch.randint(256, (q, layers * size + 64), generator=generator).to(torch.uint8)[:, 64:]
    wide = torch.zeros(q, layers * size + 64, dtype=torch.uint8)[:, 64:].copy_(host)
    words = wide.view(torch.int32)
    pages, places = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0])
    for layer in range(layers):
        there = host[:, layer * size : (layer + 1) * size]
        reference.store_pages(flat[layer], there, pages, places)
        triton_page_copy.store_pages(pools[layer], words, layer * size // 4, pages, places)
    assert torch.equal(host, wide)
    others = torch.tensor([1, 2])
    for layer in range(layers):
        mine = pools[layer].clone()
        triton_page_copy.load_pages(mine, words, layer * size // 4, others, places[:2])
        reference.load_pages(flat[layer], host[:, layer * size : (layer + 1) * size], others, places[:2])
        assert torch.equal(mine, pools[layer])
    # Two components: the first has one layer, the second the others.
    staged = torch.zeros(3, layers * size // 4, dtype=torch.int32)
    for first, last in ((0, 1), (1, layers)):
        addresses = torch.tensor([pool.data_ptr() for pool in pools[first:last]])
        triton_page_copy.gather_pages(addresses, staged, first * size // 4, size // 4, pages)
    assert torch.equal(staged.view(torch.uint8), torch.cat([each[pages] for each in flat], 1))
    copied = [pool.clone() for pool in pools]
    addresses = torch.tensor([pool.data_ptr() for pool in copied])
    triton_page_copy.copy_pages(addresses, size // 4, torch.tensor([6, 6, 1]), torch.tensor([0, 2, 5]))
    for pool, mine in zip(pools, copied, strict=True):
        reference.copy_pages(pool, torch.tensor([6, 6, 1]), torch.tensor([0, 2, 5]))
        assert torch.equal(pool, mine)
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
