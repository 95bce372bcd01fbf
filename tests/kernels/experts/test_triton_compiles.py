"""The grouped product of experts compiles for a GPU that is not here, and its tiles fit in that GPU's shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, the kernel runs on it"),
]

SHARED_KIB = 227
PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sapwood_kernels.experts import triton_experts

kernel = triton_experts._product_kernel
kinds = dict(
    x="*bf16", weight="*bf16", bias="*bf16", out="*bf16", places="*i64", experts="*i64", COUNT="i32", N="i32", EXPERTS="i32"
)
for height in (16, 64, 128):
    shape = triton_experts.tile_shape(height)
    pointers = [at for at, name in enumerate(kernel.arg_names) if kinds.get(name, "").startswith("*")]
    constants = dict(SHARE=8, K=2048, HAS_BIAS=True, BLOCK_M=height, BLOCK_N=shape.width, BLOCK_K=shape.depth)
    source = ASTSource(
        kernel, signature={name: kinds.get(name, "constexpr") for name in kernel.arg_names}, constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
    )
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(height, made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async"))
"""


def test_the_kernel_compiles_for_a_gpu_that_is_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        int(height): (int(shared), int(wgmma)) for height, shared, wgmma in map(str.split, done.stdout.splitlines())
    }
    assert found.keys() == {16, 64, 128}
    assert all(shared <= SHARED_KIB * 1024 for shared, _ in found.values())
    assert found[128][1] > 0, "tall tiles use the tensor cores of Hopper"
