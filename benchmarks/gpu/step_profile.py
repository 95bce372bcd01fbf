"""Where the device's time goes: kernels recorded with torch's profiler, summed by what they are for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

# What a kernel is for -> pattern of its name; the first that matches counts.
PARTS = {
    "attention": r"BatchDecode|BatchPrefill|PrefillWithKV|MergeStates|_split_kernel|_latent_kernel|_prefill_kernel|flash_fwd"
    r"|_merge_kernel|flashinfer|sdpa|_absorb_kernel|_values_kernel",
    "head norm, rotation, KV write": r"_qkv_kernel",
    "widening float8 pages": r"_widen_kernel",
    "to float8, with norm or gate": r"_quantise_kernel",
    "sums and exchanges of ranks": r"nccl|_rank_sum_kernel|_rank_normed_kernel|_row_exchange_kernel"
    r"|_dispatch_kernel|_combine_kernel",
    "experts": r"_product_kernel|_align_kernel|_route_kernel|_sum_kernel|_first_kernel|_second_kernel"
    r"|_grouped_kernel|_grouped_float8_kernel|_blocks_kernel|_pairs_kernel|_begins_kernel",
    "routers": r"_few_logits_kernel|_narrow_logits_kernel|_many_logits_kernel",
    "states": r"_step_kernel|_span_|_chunk_|_gated_norm_kernel|_convolution_",
    "matrix products": r"gemm|cutlass|cublas|nvjet|splitKreduce|_gemv_kernel|_rows_kernel|xmma|sm90_",
    "RMSNorm": r"_rms_norm_kernel",
    "gate": r"_gated",
    "likeliest token": r"_max_kernel|argmax|max_",
    "copies": r"Memcpy|Memset|copy|_gather_kernel",
}


def record(run: Callable[[], object], trace: Path | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of device time of ``run``, by part and by kernel, the longest first.

    Args:
        run: What is recorded; it has run before.
        trace: Where a Chrome trace goes, if anywhere.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    kernels: dict[str, float] = defaultdict(float)
    for event in profile.events():
        # NCCL's kernels come once more, by the names of torch's calls.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("nccl:"):
            kernels[event.name] += event.time_range.elapsed_us()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(trace))
    parts: dict[str, float] = defaultdict(float)
    for name, microseconds in kernels.items():
        part = next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "other")
        parts[part] += microseconds
    parts["all kernels"] = sum(kernels.values())
    return _longest(parts), _longest(kernels)


def _longest(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1]))
