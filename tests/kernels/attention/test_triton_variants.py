"""Kernels are compiled once for what a step's buffers hold, wherever in these it begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
from sapwood_kernels.attention import triton_decode, triton_gather, triton_kv_dequantise, triton_parts, triton_prefill
from sapwood_kernels.attention.latent import triton_decode as latent, triton_merge_values
from sapwood_kernels.attention.shared import triton_shared
from sapwood_kernels.sampling import triton_sampling

for kernel, names in (
    (triton_prefill._prefill_kernel, ["pages"]),
    (triton_gather._gather_kernel, ["pages"]),
    (triton_kv_dequantise._widen_kernel, ["pages"]),
    (triton_shared._shared_kernel, ["pages"]),
    (triton_decode._split_kernel, ["starts", "counts"]),
    (triton_parts._merge_kernel, ["starts", "counts"]),
    (triton_sampling._part_kernel, ["slots"]),
    (triton_sampling._draw_kernel, ["slots", "positions"]),
    (latent._latent_kernel, ["starts", "counts"]),
    (triton_merge_values._merge_values_kernel, ["starts", "counts"]),
):
    told = [each.name for each in kernel.params if each.do_not_specialize_on_alignment]
    assert set(names) <= set(told), (kernel.__name__, told)
print("done")
"""


def test_kernels_take_parts_of_buffers_at_any_address_without_another_variant() -> None:
    """What decodes of a step name comes before the pages of its prompts, so these begin anywhere."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "done\n", done.stderr
