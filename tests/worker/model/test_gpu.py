"""What is said of a GPU at the start: refusals and warnings by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sapwood_common.errors import ConfigError
from sapwood_worker.model.gpu import Gpu, check_gpu, read_gpu

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), ("sm_80", "sm_90"), 140 * GIB, 141 * GIB)
PLAIN = {"dtype": "auto", "kv_cache_dtype": "auto", "quantization": "none", "memory_fraction": 0.9}


def test_a_fitting_gpu_passes_in_silence():
    assert check_gpu(H200, **PLAIN) == []


@pytest.mark.parametrize("built", ["sm_90a", "sm_86", "compute_80", "compute_75", "gfx942"])
def test_what_torch_is_built_for_may_be_older(built: str):
    gpu = replace(H200, capability=(8, 9) if built == "sm_86" else (9, 0), built_for=(built,))
    assert check_gpu(gpu, **PLAIN) == []


@pytest.mark.parametrize(
    ("facts", "flags", "message"),
    [
        ({"capability": (6, 1)}, {}, r"--device: NVIDIA H200 \(compute capability 6.1\) is too old"),
        ({"capability": (12, 0)}, {}, r"is built for sm_80, sm_90, not for NVIDIA H200 \(compute capability 12.0\)"),
        ({"built_for": ("sm_100",)}, {}, "is built for sm_100, not for"),
        ({"built_for": ("compute_100",)}, {}, "not for NVIDIA H200"),
        ({"capability": (7, 5), "built_for": ("sm_75",)}, {}, "--dtype auto: .* take --dtype float16"),
        ({"capability": (8, 0)}, {"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3: .* needs 8.9"),
        ({"free": GIB // 2}, {}, "has 0.5 of 141.0 GiB of memory free"),
    ],
)
def test_a_gpu_that_cannot_serve_is_refused_by_name(facts, flags, message: str):
    with pytest.raises(ConfigError, match=message):
        check_gpu(replace(H200, **facts), **{**PLAIN, **flags})


def test_what_makes_it_slow_or_small_is_warned_of():
    assert check_gpu(replace(H200, capability=(7, 5), built_for=("sm_75",)), **{**PLAIN, "dtype": "float16"}) == []
    (slow,) = check_gpu(replace(H200, capability=(8, 0)), **{**PLAIN, "quantization": "fp8_block"})
    assert slow.startswith("--quantization fp8_block: NVIDIA H200 (compute capability 8.0) multiplies no float8")
    (small,) = check_gpu(replace(H200, free=70 * GIB), **PLAIN)
    assert small.startswith("others use 71.0 of NVIDIA H200")
    assert check_gpu(replace(H200, free=70 * GIB), **{**PLAIN, "memory_fraction": None}) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_machine_s_gpu_is_known():
    gpu = read_gpu(torch.device("cuda"))
    assert gpu.name and 0 < gpu.free <= gpu.total
    check_gpu(gpu, **PLAIN)
