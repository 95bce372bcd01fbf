"""Kernels of steps compile for GPUs that are not here, at the sizes of real models, without spilling registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, the kernels run on it"),
]

PROGRAM = """
import re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from sapwood_kernels.state import triton_convolution_step, triton_delta_step, triton_gated_norm, triton_selective_step
from sapwood_kernels.state import triton_space_step

def check(kernel, kinds, warps, options={}, **constants):
    kinds = dict(each.split(":") for each in kinds.split())
    every = list(kernel.arg_names)
    assert set(every) == set(kinds) | set(constants), set(every) ^ (set(kinds) | set(constants))
    signature = {name: kinds.get(name, "constexpr") for name in every}
    aligned = [name for name, kind in kinds.items() if kind.startswith("*") or "stride" in name]
    attrs = {(every.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps} | options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        ptxas = get_ptxas(90)
        ptxas = getattr(ptxas, "path", ptxas)
        said = subprocess.run([ptxas, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"], capture_output=True, text=True).stderr
    found = re.search(r"Used (\\d+) registers", said)
    spilled = re.search(r"(\\d+) bytes spill stores", said)
    wide = made.asm["ptx"].count(".v4.")
    print(kernel.__name__, found.group(1), spilled.group(1), made.metadata.shared, wide)

STATE = "states:*fp32 slots:*i64 input_stride:i32 state_stride:i32"
FEW = {"maxnreg": triton_delta_step.MOST_REGISTERS}
SPACES = (("fp32", True, 64, 128, 16), ("fp32", True, 64, 256, 1), ("bf16", False, 128, 128, 1))
for pdl in (False, True):
    for shared in (1, 2, 4):
        check(
            triton_delta_step._delta_step_kernel,
            f"inputs:*bf16 factors:*bf16 {STATE} convolution:*fp32 decay:*fp32 bias:*fp32 norm:*fp32 out:*bf16 eps:fp32"
            " scale:fp32 factor_stride:i32", 8, FEW, HEADS=16, SHARED=shared, K=128, V=128, TAPS=4, JOINED=True, BLOCK_K=128,
            BLOCK_V=128, BLOCK_TAPS=4, PDL=pdl,
        )
    for kind, stepped, dim, size, groups in SPACES:
        check(
            triton_space_step._space_step_kernel,
            f"inputs:*{kind} steps:*bf16 {STATE} decay:*fp32 bias:*fp32 skip:*fp32 out:*fp32 least:fp32 most:fp32"
            " step_stride:i32", 4, HEADS=128, PER=groups, P=dim, N=size, OFFSET=30720, X_AT=0, X_STRIDE=dim, B_AT=8192,
            C_AT=8320, GROUP_STRIDE=size, STEPPED=stepped, BLOCK_P=4096 // size, BLOCK_N=size, PDL=pdl,
        )
    for out, taps, gated in (("fp32", 4, False), ("bf16", 3, True)):
        check(
            triton_convolution_step._convolution_step_kernel,
            f"inputs:*bf16 {STATE} weight:*fp32 bias:*fp32 out:*{out}", 4, C=10240, TAPS=taps, GATED=gated,
            HAS_BIAS=not gated, BLOCK=256, BLOCK_TAPS=4, PDL=pdl,
        )
    check(
        triton_selective_step._selective_step_kernel,
        f"x:*fp32 steps:*bf16 b:*bf16 c:*bf16 gate:*bf16 {STATE.replace('input', 'x')} decay:*fp32 skip:*fp32 out:*bf16"
        " step_stride:i32 b_stride:i32 c_stride:i32 gate_stride:i32", 4, C=8192, N=16, OFFSET=24576, BLOCK_C=128, BLOCK_N=16,
        PDL=pdl,
    )
    for out, count, groups, weights in (("bf16", 8192, 1, 1), ("bf16", 1024, 8, 8), ("bf16", 128, 32, 1)):
        check(
            triton_gated_norm._gated_norm_kernel,
            f"x:*fp32 gate:*bf16 weight:*fp32 out:*{out} eps:fp32 x_stride:i32 gate_stride:i32 gate_part:i32",
            max(count, 2048) // 512, N=count, GROUPS=groups, PER=groups, WEIGHTS=weights, NORM=True, GATE_FIRST=groups > 1,
            SIGMOID=False, BLOCK_G=max(2048 // count, 1), BLOCK=count, PDL=pdl,
        )
"""


def test_steps_compile_without_spilling(lines_of_compiler):
    lines = lines_of_compiler(PROGRAM)
    assert len(lines) == 24
    for name, registers, spilled, _, wide in lines:
        assert int(spilled) <= 16, f"{name} spills with {registers} registers"
        assert int(wide) > 0, f"{name} reads no 16 bytes at once"
