"""Kernels of weights in 4 and 8 bits compile for GPUs that are not here, and their tiles fit in these GPUs' shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, the kernels run on it"),
]

SHARED_KIB = 227
PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sapwood_kernels.quantised import triton_digits, triton_few, triton_grouped, triton_int8, triton_many, triton_one
from sapwood_kernels.quantised import triton_one_wide, triton_permuted, triton_row

def check(kernel, kinds, warps, stages=2, language=ASTSource, described={}, **constants):
    kinds = dict(each.split(":") for each in kinds.split()) | described
    names = {name for name, kind in kinds.items() if kind.startswith("*") or "stride" in name}
    every = [each for each in kernel.arg_names]
    signature = {name: kinds.get(name, "constexpr") for name in every}
    assert set(every) == set(kinds) | set(constants), set(every) ^ (set(kinds) | set(constants))
    source = language(
        kernel, signature=signature, constexprs=constants,
        attrs={(every.index(name),): [["tt.divisibility", 16]] for name in names},
    )
    options = {"num_warps": warps} | ({"num_stages": stages} if language is ASTSource else {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.__name__, made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async"))

KINDS = {
    "int4": ("*u8", "*fp16", dict(BITS=4, GROUP=128, HAS_ZEROS=True, HAS_MINS=False, HAS_TABLE=False, HAS_FACTORS=False)),
    "nvfp4": ("*u8", "*fp8e4nv", dict(BITS=4, GROUP=16, HAS_ZEROS=False, HAS_MINS=False, HAS_TABLE=True, HAS_FACTORS=True)),
    "float8": ("*fp8e4nv", "*fp32", dict(BITS=8, GROUP=128, HAS_ZEROS=False, HAS_MINS=False, HAS_TABLE=False, HAS_FACTORS=False)),
    "Q4_K": ("*u8", "*fp32", dict(BITS=4, GROUP=32, HAS_ZEROS=False, HAS_MINS=True, HAS_TABLE=False, HAS_FACTORS=False)),
}
N, K = 4096, 4096
for codes, scales, settings in KINDS.values():
    width, group = K * settings["BITS"] // 8, settings["GROUP"]
    shape = dict(K=K, WIDTH=width, GROUPS=K // group)
    tensors = f"codes:{codes} scales:{scales} zeros:*u8 mins:*fp32 table:*fp32 factors:*fp32"
    for count in (16, 256):
        block_m, block_n, block_k, warps, stages = triton_grouped.block_shape(count, N, 132)
        check(
            triton_grouped._product_kernel, f"x:*bf16 {tensors} out:*bf16 M:i32 N:i32 x_stride:i32", warps, stages, **shape,
            **settings, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        )
    check(triton_grouped._widen_kernel, f"{tensors} out:*bf16 N:i32", 4, **shape, **settings, BLOCK_N=32, BLOCK_K=128)
    block_n, block_w, warps = triton_row.block_shape(N, width)
    row = {name: value for name, value in settings.items() if name != "GROUP"}
    check(
        triton_row._row_kernel,
        f"x:*bf16 order:*i64 {tensors} norm:*fp32 bias:*bf16 residual:*bf16 out:*bf16 eps:fp32", warps, **shape, **row,
        N=N, HAS_ORDER=False, HAS_NORM=True, HAS_BIAS=False, ADDS=False, GATE=1, BLOCK_N=block_n, BLOCK_W=block_w,
        PER=group * settings["BITS"] // 8,
    )
for rows, columns, count, gate in ((28672, 4096, 1, 1), (4096, 14336, 8, 0), (6144, 4096, 1, 0), (128, 640, 16, 2)):
    splits, wide, tall, depth = triton_few.block_shape(count, rows, columns, gated=gate != 0)
    block_m = 8 if count <= 8 else triton_few.MOST
    check(
        triton_few._few_kernel,
        "x:*bf16 codes:*u16 scales:*fp16 zeros:*u8 factors:*fp32 bias:*bf16 residual:*bf16 out:*bf16 M:i32 x_stride:i32",
        splits * wide, language=GluonASTSource, N=rows // (2 if gate else 1), K=columns, GROUPS=columns // 128,
        HAS_ZEROS=not gate, HAS_FACTORS=gate == 2, HAS_BIAS=gate == 2, ADDS=not gate, GATE=gate, SPLITS=splits, WIDE=wide,
        TALL=tall, DEPTH=depth, BLOCK_M=block_m,
    )
for rows, columns, gate in ((28672, 4096, 1), (4096, 14336, 0), (6144, 4096, 0)):
    settings = dict(
        language=GluonASTSource, N=rows // (2 if gate else 1), K=columns, HAS_ZEROS=True, HAS_FACTORS=gate == 0,
        HAS_NORM=columns == 4096, HAS_BIAS=gate == 0, ADDS=not gate, GATE=gate,
    )
    tensors = "x:*bf16 scales:*bf16 zeros:*u8 factors:*fp32 norm:*fp32 bias:*bf16 residual:*bf16 out:*bf16 eps:fp32"
    if columns > triton_one._MOST_COLUMNS:
        shares, tall, depth = triton_one_wide.block_shape(columns, gated=gate != 0)
        check(
            triton_one_wide._one_kernel, tensors + " codes:*u16", shares, **settings, SHARES=shares, TALL=tall, DEPTH=depth,
        )
        continue
    shares, wide, tall, depth = triton_one.block_shape(rows, columns, gated=gate != 0)
    check(
        triton_one._one_kernel, tensors + " codes:*u8", shares * wide, **settings, SHARES=shares, WIDE=wide, TALL=tall,
        DEPTH=depth, PARTS=triton.next_power_of_2(columns // (256 * shares)),
    )
for count, scales in ((64, "bf16"), (128, "fp32"), (256, "fp16")):
    block_m, stages = triton_many.block_shape(count, 28672, 4096, 132)
    order = gl.NVMMASharedLayout.get_default_for([block_m, 128], gl.bfloat16)
    word_order = gl.NVMMASharedLayout.get_default_for([128, 16], gl.int32)
    out_order = gl.NVMMASharedLayout.get_default_for([block_m, 64], gl.bfloat16)
    sum_order = gl.NVMMASharedLayout.get_default_for([block_m, 32], gl.float32)
    check(
        triton_many._many_kernel,
        f"scales:*{scales} zeros:*u8 partial:*fp32 done:*i32 M:i32 SHARE:i32 N:i32 STEPS:i32 ADDS:i32", 4,
        described={
            "x": f"tensordesc<bf16[{block_m}, 128],{order!r}>", "words": f"tensordesc<i32[128, 16],{word_order!r}>",
            "out": f"tensordesc<bf16[{block_m}, 64],{out_order!r}>",
            "sums": f"tensordesc<fp32[{block_m}, 32],{sum_order!r}>",
        },
        language=GluonASTSource, PER=1, HAS_ZEROS=True, BLOCK_M=block_m, STAGES=stages,
    )
for gate in (0, 1):
    check(
        triton_permuted._permute_kernel,
        "x:*bf16 order:*i64 norm:*fp32 out:*bf16 cleared:*i32 eps:fp32 x_stride:i32 count:i32", 8, K=K, HAS_ORDER=not gate,
        HAS_NORM=not gate, GATE=gate, BLOCK=2048 if gate else 4096, CLEARED=512, PDL=True,
    )
for gate in (0, 1):
    check(
        triton_int8._quantise_kernel, "x:*bf16 weight:*fp32 out:*i8 scales:*fp32 eps:fp32 x_stride:i32", 8, N=K,
        HAS_NORM=not gate, GATE=gate, BLOCK=4096,
    )
for count, gate in ((16, 0), (16, 1), (8192, 0), (8192, 1)):
    block_m, block_n, block_k, warps, stages = triton_int8.block_shape(count, N, 132)
    check(
        triton_int8._product_kernel, "x:*i8 x_scales:*fp32 weight:*i8 scales:*fp32 out:*bf16 M:i32 N:i32", warps, stages,
        K=K, EVEN=True, ADDS=not gate, GATE=gate, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, TOGETHER=8,
    )
check(
    triton_digits._digits_kernel, "x:*bf16 norm:*fp32 digits:*i8 units:*fp32 eps:fp32 x_stride:i32", 8, K=K, HAS_NORM=True,
    BLOCK=4096, PDL=True,
)
for count in (1, 64, 256):
    tall, wide, deep, warps, stages = triton_digits.block_shape(count)
    check(
        triton_digits._product_kernel, "units:*fp32 codes:*i8 scales:*fp32 out:*bf16 T:i32 N:i32", warps,
        described={"digits": f"tensordesc<i8[{2 * tall}, {deep}]>", "weight": f"tensordesc<i8[{wide}, {deep}]>"},
        K=K, BLOCK_T=tall, BLOCK_N=wide, BLOCK_K=deep, STAGES=stages, AHEAD=512, PDL=count == 1,
    )
"""


def test_kernels_compile_for_a_gpu_that_is_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 38
    for line in lines:
        assert int(line.split()[1]) <= SHARED_KIB * 1024, line
