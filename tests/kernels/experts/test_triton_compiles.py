"""The kernels of experts compile for a GPU that is not here, and their tiles fit in that GPU's shared memory."""

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
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sapwood_kernels import triton_digest
from sapwood_kernels.experts import triton_experts, triton_few_tokens, triton_float8_blocks, triton_routing
from sapwood_kernels.experts import triton_many_float8 as many_float8
from sapwood_kernels.experts import triton_many_tokens as many
from sapwood_kernels.experts.tiles import plan, triton_align


def compiled(kernel, kinds, constants, language=ASTSource, **options):
    pointers = [at for at, name in enumerate(kernel.arg_names) if kinds.get(name, "").startswith("*")]
    source = language(
        kernel, signature={name: kinds.get(name, "constexpr") for name in kernel.arg_names}, constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.metadata.shared, made.asm["ptx"].count("wgmma.mma_async")


parts = ("scales", "zeros", "mins", "table", "factors", "orders")
common = dict(x="*bf16", bias="*bf16", out="*bf16")
formats = {
    "bf16": (dict(weight="*bf16"), 0, 0),
    "fp8": (dict(weight="*fp8e4nv", scales="*fp32"), 128, 8),
    "fp8rows": (dict(weight="*fp8e4nv", factors="*fp32"), 2048, 8),
    "mxfp4": (dict(weight="*u8", scales="*u8"), 32, 4),
    "nf4": (dict(weight="*u8", scales="*fp32", table="*fp32"), 64, 4),
    "int4": (dict(weight="*u8", scales="*fp16", zeros="*u8"), 128, 4),
    "int4mins": (dict(weight="*u8", scales="*fp32", mins="*fp32"), 32, 4),
    "int4order": (dict(weight="*u8", scales="*fp16", zeros="*u8", orders="*i32"), 128, 4),
    "int8": (dict(weight="*u8", scales="*bf16", zeros="*u8"), 2048, 8),
    "int8rows": (dict(weight="*i8", factors="*fp32"), 2048, 8),
}
for name, (stored, group, bits) in formats.items():
    held = {part: None for part in parts if part not in stored}  # what the format has not
    tall = 128 if name == "fp8" else 1
    kinds = common | stored | dict(places="*i32", experts="*i32", COUNT="i32", N="i32", EXPERTS="i32", alpha="fp32", limit="fp32")
    often = name in ("bf16", "fp8", "mxfp4", "int4", "int8")  # of others a few
    for height in (16, 64, 128) if name == "bf16" else (16, 128) if often else (128,):
        shape = plan.tile_shapes(height, stored=name != "bf16")[0]
        constants = held | dict(
            x_scales=None, SHARE=8, K=2048, GATE=0 if bits < 8 else -1, GROUP=group, TALL=tall, BITS=bits,
            INTEGERS=name[:3] == "int", BLOCK_M=height, BLOCK_N=shape.width, BLOCK_K=shape.depth, PDL=height == 16,
        )
        options = {"num_warps": shape.warps, "num_stages": shape.stages}
        print(name, height, *compiled(triton_experts._product_kernel, kinds, constants, **options))
        if name in ("fp8rows", "int8rows") and height == 128:  # inputs are of 8 bits, too
            del constants["x_scales"]
            rounded = kinds | dict(x=stored["weight"], x_scales="*fp32")
            print(name + "-x", height, *compiled(triton_experts._product_kernel, rounded, constants, **options))
    if not often and name != "int4mins":
        continue
    kinds = common | stored | dict(inner="*bf16", ids="*i32", weights="*fp32")
    kinds |= dict(N="i32", EXPERTS="i32", alpha="fp32", limit="fp32")
    constants = held | dict(GROUP=group, TALL=tall, BITS=bits, INTEGERS=name[:3] == "int", K=2048, PDL=True)
    first, second = (dict(BLOCK_N=shape.width, BLOCK_K=shape.depth) for shape in plan.tile_shapes(1, stored=name != "bf16"))
    one = constants | dict(SHARE=8, GATE=0) | first
    print(name, 1, *compiled(triton_few_tokens._first_kernel, kinds, one, num_warps=4))
    two = constants | dict(CHOSEN=8, ADDS=True, BLOCK_CHOSEN=8) | second
    print(name, 2, *compiled(triton_few_tokens._second_kernel, kinds, two, num_warps=8))
kinds = dict(parts="*bf16", ids="*i32", weights="*fp32", out="*bf16", where="*i32", EXPERTS="i32", N="i32")
for placed in (False, True):
    constants = dict(CHOSEN=8, ADDS=True, PLACED=placed, BLOCK=512, PDL=not placed)
    print("sum", placed + 0, *compiled(triton_experts._sum_kernel, kinds, constants))
kinds = dict(ids="*i32", places="*i32", experts="*i32", COUNT="i32", TILES="i32", EXPERTS="i32")
print("align", 0, *compiled(triton_align._align_kernel, kinds, dict(HEIGHT=16, BINS=512, BLOCK=4096, PDL=True), num_warps=8))
kinds |= dict(counts="*i32", where="*i32", PARTS="i32")
print("count", 0, *compiled(triton_align._count_pairs_kernel, kinds, dict(BINS=256, BLOCK=4096), num_warps=8))
kinds |= dict(begins="*i32")
print("begin", 0, *compiled(triton_align._begins_kernel, kinds, dict(HEIGHT=128, BINS=256, BLOCK_PARTS=16)))
print("place", 0, *compiled(triton_align._place_pairs_kernel, kinds, dict(BLOCK=4096), num_warps=8))
bulk = {
    rows: f"tensordesc<bf16[{rows},{columns}],{gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)!r}>"
    for rows, columns in ((128, 64), (64, 128))
}
kinds = dict(weight=bulk[128], out=bulk[64], places="*i32", experts="*i32", alpha="fp32", limit="fp32")
kinds |= dict.fromkeys(("COUNT", "WORK", "BLOCKS", "N", "EXPERTS"), "i32")
for gate in (-1, 0, 1, 2):
    constants = dict(SHARE=8, K=2048, GATE=gate, GATHERS=gate >= 0, STAGES=many._STAGES)
    taken = dict(x="*bf16" if gate >= 0 else bulk[128])
    print("many", gate, *compiled(many._grouped_kernel, kinds | taken, constants, GluonASTSource, num_warps=4))
kinds = dict(x="*fp8e4nv", x_scales="*fp32", weight="*fp8e4nv", scales="*fp32", out="*bf16", places="*i32", experts="*i32")
kinds |= dict.fromkeys(("COUNT", "N", "EXPERTS", "STRIDE"), "i32")
for height, gate in ((16, 0), (32, -1), (64, 0), (128, 0)):
    shape = plan.tile_shapes(height, stored=True)[0]
    constants = dict(SHARE=8, K=7168, GATE=gate, BLOCK=128, BLOCK_M=height, BLOCK_N=shape.width, PDL=height == 16)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    print("blocks", height, *compiled(triton_float8_blocks._blocks_kernel, kinds, constants, **options))
bulk8 = {
    rows: f"tensordesc<fp8e4nv[{rows},128],{gl.NVMMASharedLayout.get_default_for([rows, 128], gl.float8e4nv)!r}>"
    for rows in (64, 128)
}
kinds = dict(x_scales="*fp32", weight=bulk8[128], scales="*fp32", out_scales="*fp32", places="*i32", experts="*i32")
kinds |= dict.fromkeys(("COUNT", "WORK", "BLOCKS", "N", "EXPERTS", "STRIDE", "OUT_STRIDE"), "i32")
for gate in (-1, 0, 1):
    constants = dict(SHARE=8, K=2048, GATE=gate, GATHERS=gate >= 0, STAGES=many_float8._STAGES)
    taken = dict(x="*fp8e4nv" if gate >= 0 else bulk8[128], out=bulk8[64] if gate >= 0 else bulk[64])
    print("many8", gate, *compiled(many_float8._grouped_float8_kernel, kinds | taken, constants, GluonASTSource, num_warps=4))
kinds = dict(
    logits="*fp32", correction="*fp32", live="*i32", ids="*i32", weights="*fp32", counts="*i64", of_rank="i32"
)  # fmt: skip
constants = dict(
    EXPERTS=256, CHOSEN=8, SIGMOID=True, RENORMALISE=True, SCALE=2.5, GROUPS=8, CHOSEN_GROUPS=4, TWO_BEST=True, CORRECTED=True,
    BLOCK=256, BLOCK_GROUPS=8, BLOCK_CHOSEN=16, SHARES=8, SHARED=1, PDL=True,
)
print("route", 0, *compiled(triton_routing._route_kernel, kinds, constants))
kinds = dict(x="*bf16", weight="*fp32", bias="*fp32", norm="*fp32", normed="*bf16", out="*fp32", T="i32", eps="fp32")
constants = dict(EXPERTS=256, K=7168, HAS_BIAS=False)
few = constants | dict(HAS_NORM=True, BLOCK_N=2, BLOCK_K=8192, PDL=True)
print("router", 0, *compiled(triton_routing._few_logits_kernel, kinds, few, num_warps=8))
for wide, deep in ((128, 2048), (64, 2048), (128, 7168)):
    kinds |= dict(weight="*bf16")
    narrow = dict(EXPERTS=wide, K=deep, HAS_BIAS=False, BLOCK_M=16, BLOCK_N=wide, BLOCK_K=256, SHARES=8, PDL=True)
    print("narrow", wide + deep, *compiled(triton_routing._narrow_logits_kernel, kinds, narrow, num_warps=8))
kinds |= dict(weight="*fp32")
for height, width, depth, stages, shares in triton_routing.TILES:
    tile = constants | dict(BLOCK_M=height, BLOCK_N=width, BLOCK_K=depth, SHARES=shares)
    print("router", height + shares, *compiled(triton_routing._many_logits_kernel, kinds, tile, num_warps=4, num_stages=stages))
kinds = dict(table="*i64", copies="*i64", ids="*i32", out="*i32", COUNT="i32", first="i32")
print("turns", 0, *compiled(triton_routing._turns_kernel, kinds, dict(CHOSEN=8, RANKS=8, BLOCK=256)))
kinds = dict(words="*i64", total="*i64", COUNT="i32")
print("digest", 0, *compiled(triton_digest._digest_kernel, kinds, dict(BLOCK=1024)))
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = map(str.split, done.stdout.splitlines())
    found = {(name, int(height)): (int(shared), int(wgmma)) for name, height, shared, wgmma in rows}
    formats = {"bf16", "fp8", "fp8rows", "mxfp4", "nf4", "int4", "int4mins", "int4order", "int8", "int8rows"}
    assert {name for name, _ in found} == formats | {
        "fp8rows-x",
        "int8rows-x",
        "sum",
        "align",
        "count",
        "begin",
        "place",
        "many",
        "blocks",
        "many8",
        "route",
        "router",
        "narrow",
        "turns",
        "digest",
    }
    assert all(shared <= SHARED_KIB * 1024 for shared, _ in found.values())
    assert sum(height in (1, 2) for name, height in found if name not in ("sum", "many", "many8")) == 12
    assert all(wgmma for (name, _), (_, wgmma) in found.items() if name in ("many", "blocks", "many8"))
    tall = [wgmma for (_, height), (_, wgmma) in found.items() if height == 128]
    assert len(tall) == len(formats) + 3 and all(tall), "tall tiles use the tensor cores of Hopper"
