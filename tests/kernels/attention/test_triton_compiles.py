"""The attention kernels compile for GPUs that are not here, and their tiles fit in these GPUs' shared memory."""

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

SHARED = {89: 99, 90: 227}
"""KiB of shared memory that a program may have, by compute capability times 10."""

PROGRAM = """
import os
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sapwood_kernels import triton_qkv
from sapwood_kernels.attention import triton_decode as decoding, triton_merge as merging, triton_parts as parts
from sapwood_kernels.attention import triton_prefill as prefilling
from sapwood_kernels.attention.shared import triton_shared as sharing
from sapwood_kernels.attention.latent import triton_decode as latent, triton_shared as sharing_latent
from sapwood_kernels.attention.latent import triton_merge_values as adding, triton_stream as streaming_latent
from sapwood_kernels.latent import triton_absorb as absorbing, triton_expand as expanding
from sapwood_kernels.latent import triton_many_heads as heads_of, triton_store as store

capability = int(sys.argv[1])

def check(kernel, kinds, warps, language=ASTSource, **constants):
    names = {name for name, kind in kinds.items() if name in kernel.arg_names and (kind.startswith("*") or "stride" in name)}
    source = language(
        kernel, signature={name: kinds.get(name, "constexpr") for name in kernel.arg_names}, constexprs=constants,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    print(kernel.__name__, constants, made.metadata.shared)
    return made

def stack(made):  # bytes of a thread's: registers that were spilled
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(told.split("STACK:")[1].split()[0])

def kinds(text):
    return dict(each.split(":") for each in text.split())

PREFILL = kinds(
    "query:*bf16 keys:*bf16 values:*bf16 tiles:*i32 starts:*i32 indptr:*i32 lengths:*i32 pages:*i32 sinks:*fp32 out:*bf16 "
    "sums:*fp32 scale:fp32 value_scale:fp32 softcap:fp32 heads:i32 page_stride:i32 slot_stride:i32 head_stride:i32"
)
DECODE = kinds(
    "query:*bf16 keys:*bf16 values:*bf16 indptr:*i32 lengths:*i32 starts:*i32 counts:*i32 pages:*i32 sinks:*fp32 part:*fp32 "
    "sums:*fp32 out:*bf16 scale:fp32 value_scale:fp32 softcap:fp32 page_stride:i32 slot_stride:i32 head_stride:i32"
)
SHARED = kinds(
    "query:*bf16 keys:*bf16 values:*bf16 indptr:*i32 lengths:*i32 pages:*i32 order:*i32 items:*i32 part:*fp32 sums:*fp32 "
    "scale:fp32 value_scale:fp32 softcap:fp32 page_stride:i32 slot_stride:i32 head_stride:i32 first_slot:i32 slots_of_row:i32"
)
QKV = kinds(
    "qkv:*bf16 query:*bf16 keys:*bf16 values:*bf16 slots:*i64 cos:*bf16 sin:*bf16 q_weight:*fp32 k_weight:*fp32 eps:fp32 "
    "key_factor:fp32 value_factor:fp32 page_stride:i32 slot_stride:i32 head_stride:i32"
)
LATENT = kinds(
    "query:*bf16 stored:*bf16 indptr:*i32 lengths:*i32 starts:*i32 counts:*i32 pages:*i32 part:*fp32 sums:*fp32 out:*bf16 "
    "scale:fp32 value_scale:fp32 page_stride:i32 slot_stride:i32"
)
SHARED_LATENT = kinds(
    "query:*bf16 stored:*bf16 indptr:*i32 pages:*i32 order:*i32 items:*i32 part:*fp32 sums:*fp32 scale:fp32 value_scale:fp32 "
    "page_stride:i32 slot_stride:i32 first_slot:i32 slots_of_row:i32"
)
STORE = kinds(
    "vectors:*bf16 query:*bf16 turned:*bf16 pages:*bf16 slots:*i64 cos:*bf16 sin:*bf16 weight:*fp32 eps:fp32 factor:fp32 "
    "vector_stride:i32 query_stride:i32 page_stride:i32 slot_stride:i32"
)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

for dim, group, dtype, window, capped in (
    (128, 4, "bf16", 0, False), (128, 5, "bf16", -8192, False), (64, 5, "bf16", 0, False), (256, 4, "bf16", 512, True),
    (80, 1, "fp32", 0, False),
):
    stored = ["*" + dtype] + ["*fp8e4nv"] * (dtype == "bf16" and capability >= 89)
    rows = prefilling.tile_rows(group, dim, TYPES[dtype])
    block, stages = prefilling.key_blocks(dim, TYPES[dtype], divmod(capability, 10))
    for cache in stored:
        check(
            prefilling._prefill_kernel,
            {**PREFILL, "query": "*" + dtype, "out": "*" + dtype, "keys": cache, "values": cache},
            prefilling.num_warps(rows), GROUP=group, D=dim, PAGE=16, CAUSAL=dim != 128, WINDOW=window, CAPPED=capped,
            SINKS=dim == 64, SUMS=dim != 256, FLOAT8="fp8" in cache, TOKENS=prefilling.tile_tokens(group, dim, TYPES[dtype]),
            ROWS=rows, BLOCK_D=triton.next_power_of_2(dim), BLOCK=block, STAGES=stages, ALIKE=False,
        )
for words, warps, stages in ((False, 4, 3), (True, 1, 2), (True, 2, 5))[: 1 + 2 * (capability >= 89)]:
    cache = "*i32" if words else "*bf16"
    check(
        decoding._split_kernel, {**DECODE, "keys": cache, "values": cache}, warps, GROUP=4, D=128, PAGE=16, SPLITS=8,
        SLOTS=24, LEAST=1, WINDOW=0 if words else -8192, CAPPED=False, SINKS=words, SHARED=True, FLOAT8=words, WORDS=words,
        ROWS=16, BLOCK_D=128, BLOCK=64, STAGES=stages, PDL=capability >= 90,
    )
for dim, group, batch, window, cache in (
    (128, 4, 256, 0, "*bf16"), (128, 5, 4, -8192, "*bf16"), (256, 2, 256, 512, "*bf16"), (64, 5, 256, 0, "*bf16"),
    (128, 4, 256, 0, "*fp8e4nv"),
)[: 4 + (capability >= 89)]:
    rows = sharing.tile_rows(group, dim, batch)
    stages, warps = sharing.tile_pipeline(rows, divmod(capability, 10))
    check(
        sharing._shared_kernel, {**SHARED, "keys": cache, "values": cache}, warps, GROUP=group, D=dim, PAGE=16,
        FIELDS=8, WINDOW=window, CAPPED=dim == 256, FLOAT8="fp8" in cache, ROWS=rows, BLOCK_D=dim, BLOCK=sharing.tile_keys(dim),
        STAGES=stages,
    )
for dim, slots in ((128, 32), (512, 32), (128, 64)):
    made = check(
        parts._merge_kernel, kinds("part:*fp32 sums:*fp32 lengths:*i32 starts:*i32 counts:*i32 out:*bf16"),
        parts.merge_warps(dim * slots), HEADS=32, D=dim, SPLITS=8, SLOTS=slots - 8, LEAST=512, WINDOW=0, SHARED=True, BLOCK_D=dim,
        BLOCK=slots, PDL=capability >= 90,
    )
    assert stack(made) == 0, "a program's parts do not fit in its registers"
check(
    merging._add_kernel, kinds("out:*bf16 sums:*fp32 part:*bf16 part_sums:*fp32 rows:*i32 first:i32"), 4, HEADS=32, D=128,
    BLOCK_D=128, BLOCK=32,
)
for cache in ["*bf16"] + ["*fp8e4nv"] * (capability >= 89):
    for splits, by_values in ((8, False), (32, False), (32, True)):
        block, warps, stages = latent.tile_of(splits)
        check(
            latent._latent_kernel, {**LATENT, "stored": cache}, warps, HEADS=128, R=512, E=64, PAGE=16, SPLITS=splits,
            SLOTS=splits + 16, LEAST=1, SHARED=True, FLOAT8="fp8" in cache, ROWS=latent.HEADS_OF_BLOCK, BLOCK_R=512, BLOCK_E=64,
            BLOCK=block, STAGES=stages, JOINED=by_values, PDL=capability >= 90,
        )
    requests = sharing_latent.requests_of(divmod(capability, 10))
    check(
        sharing_latent._shared_latent_kernel, {**SHARED_LATENT, "stored": cache}, sharing_latent.warps_of(requests), HEADS=128,
        R=512, E=64, PAGE=16, FIELDS=8, FLOAT8="fp8" in cache, HEADS_HERE=16, ROWS=16 * requests, BLOCK_R=512, BLOCK_E=64,
        BLOCK=sharing_latent._KEYS_OF_BLOCK, STAGES=sharing_latent._STAGES,
    )
    check(
        store._store_kernel, {**STORE, "pages": cache}, 2, HEADS=128, R=512, N=128, E=64, PAGE=16, INTERLEAVED=True,
        SCALED="fp8" in cache, BLOCK_R=512, BLOCK_N=128, HALF=32, BLOCK=8, PDL=capability >= 90,
    )
joined = kinds(
    "vectors:*bf16 query:*bf16 up:*bf16 out:*bf16 pages:*bf16 slots:*i64 cos:*bf16 sin:*bf16 weight:*fp32 eps:fp32 factor:fp32 "
    "T:i32 vector_stride:i32 query_stride:i32 page_stride:i32 slot_stride:i32 part:*fp32 sums:*fp32 lengths:*i32 starts:*i32 "
    "counts:*i32"
)
for tokens, nope, value, cache in (
    (16, 128, 128, "*bf16"), (64, 192, 256, "*bf16"), (16, 128, 128, "*fp8e4nv"),
)[: 2 + (capability >= 89)]:
    check(
        absorbing._absorb_kernel, {**joined, "pages": cache}, 4, HEADS=16, R=512, N=nope, V=value, E=64, PAGE=16,
        INTERLEAVED=True, SCALED="fp8" in cache, BLOCK_T=tokens, OWN=tokens // 8, BLOCK_N=triton.next_power_of_2(nope),
        BLOCK_R=64, WHOLE=512, HALF=32, PDL=capability >= 90,
    )
for rows, slots in ((16, 32), (128, 32), (16, 48)):
    made = check(
        adding._merge_values_kernel, joined, adding.WARPS, HEADS=16, N=128, V=128, R=512, SPLITS=32, SLOTS=slots, LEAST=1,
        KEYS=32, SHARED=slots > 32, BLOCK=triton.next_power_of_2(slots), BLOCK_V=adding.numbers_of(rows), BLOCK_R=512,
        PDL=capability >= 90,
    )
    assert stack(made) == 0, "a program's parts do not fit in its registers"
heads = kinds("query:*bf16 summed:*bf16 up:*bf16 out:*bf16 T:i32 token_stride:i32 head_stride:i32")
some = dict(HEADS=16, N=128, V=128, R=512, BLOCK_T=64, BLOCK_K=64, PDL=capability >= 90)
check(heads_of._absorb_kernel, heads, 4, E=64, BLOCK_R=64, BLOCK_E=64, **some)
check(heads_of._values_kernel, heads, 4, BLOCK_V=64, **some)
for wide in (False, True):
    check(
        expanding._join_kernel, kinds("both:*bf16 ends:*bf16 keys:*bf16 values:*bf16 end_stride:i32"), 4, HEADS=16, N=128, V=128,
        E=64, WIDE=wide, BLOCK_N=128, BLOCK_E=64, BLOCK_V=256, BLOCK=16,
    )
if capability == 90:
    def tile(rows):
        return f"tensordesc<bf16[{rows}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"

    stream = kinds(
        "indptr:*i32 lengths:*i32 pages:*i32 part:*fp32 sums:*fp32 flags:*i32 out:*bf16 scale:fp32 batch:i32"
    )
    for heads in (8, 16):
        check(
            streaming_latent._latent_stream_kernel, {**stream, "query": tile(heads), "stored": tile(16)}, 4, GluonASTSource,
            HEADS=heads, R=512, PAGE_ROWS=16, ROWS=heads, STAGES=2, BATCH=256, BEGIN=2,
        )
for dim, rotated, interleaved in ((128, 128, False), (128, 96, False), (96, 96, False), (128, 64, True)):
    check(
        triton_qkv._qkv_kernel, QKV, 1, HEADS=32, KV_HEADS=8, DIM=dim, ROTATED=rotated, INTERLEAVED=interleaved, PAGE=16,
        NORM=True, SCALED=False, BLOCK=1, BLOCK_HALF=64, PDL=capability >= 90,
    )
"""


@pytest.mark.parametrize("capability", sorted(SHARED))
def test_kernels_compile_for_a_gpu_that_is_not_here(capability: int):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 6
    for line in lines:
        assert int(line.split()[-1]) <= SHARED[capability] * 1024, line
