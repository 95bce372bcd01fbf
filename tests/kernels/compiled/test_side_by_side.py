"""Kernels that are noted instead of launched, and compiled by other processes for a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is made up"),
]

PROGRAM = """
import importlib

import torch
import triton
from triton import knobs

from sapwood_kernels.attention.triton_decode import decode_attention
from sapwood_kernels.compiled.side_by_side import Compilers, Kernel, _Elsewhere, noted
from sapwood_kernels.quantised import triton_digits, triton_few, triton_many, triton_one
from sapwood_kernels.quantised.grouped import round_to_groups

class Driver(_Elsewhere):
    def get_current_stream(self, device):
        return 0

triton.runtime.driver.set_active(Driver(90))
compilers = Compilers(2, (9, 0))
pages, query = torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(4, 8, 64, dtype=torch.bfloat16)
indptr, ids, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 2, 3, 4], [0, 1, 2, 3], [4] * 4))
weight, row = round_to_groups(torch.ones(128, 512).bfloat16(), 128), torch.ones(1, 512).bfloat16()
with noted() as kernels:
    for _ in range(3):
        out = torch.full_like(query, 7.0)
        decode_attention(query, pages, pages, indptr, ids, lengths, splits=4, scale=0.1, window=None, softcap=None, out=out)
        assert (out == 7).all()
    triton_few.few_rows(row, weight)
    triton_one.one_row(row, weight)
    triton_many.product(row.expand(20, -1), weight, 3)
    triton_digits.product(row, torch.ones(128, 512, dtype=torch.int8), torch.ones(128, 1))
names = ["_split_kernel", "_merge_kernel", "_few_kernel", "_one_kernel", "_permute_kernel", "_many_kernel"]
names += ["_digits_kernel", "_product_kernel"]
assert [kernel.name for kernel in kernels] == names, kernels
assert knobs.runtime.jit_cache_hook is None
compilers.compile([*kernels, Kernel("sapwood_kernels.triton_norm", "no_such_kernel", "{}")], print)
compilers.close()
found = []
knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
for kernel in kernels:
    getattr(importlib.import_module(kernel.module), kernel.name).preload(kernel.variant)
assert found == [True] * 8, found
other = Compilers(1, (9, 0))
other.close()  # with nothing to do
print("fine")
"""


def test_noted_kernels_are_not_launched_and_are_cached_once_others_compile_them(tmp_path):
    places = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=places | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("fine\n"), done.stderr[-3000:]
    assert "no_such_kernel could not be compiled ahead" in done.stderr
