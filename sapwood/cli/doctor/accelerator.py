"""Looks at torch, GPUs, their driver and the libraries of their kernels."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from sapwood.cli.doctor.finding import Finding

_GIB = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")
_CUDA_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


def driver_version() -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    if shutil.which("nvidia-smi") is not None:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[0].strip()
    try:
        return next((word for word in _DRIVER.read_text().split() if word[:1].isdigit()), None)
    except OSError:
        return None


def examine_accelerators() -> Iterator[Finding]:
    """torch, the driver, each GPU, and what kernels on them need."""
    driver = driver_version()
    if importlib.util.find_spec("torch") is None:
        if driver is not None:
            yield Finding("driver", "ok", f"NVIDIA {driver}")
        return  # the finding on the worker's packages says that torch is missing
    import torch

    built_for = torch.version.cuda
    yield Finding("torch", "ok", f"{torch.__version__}, built for {f'CUDA {built_for}' if built_for else 'CPUs only'}")
    if driver is None:
        note = "no NVIDIA driver answers: workers compute on the CPU"
        yield Finding("gpu", "note", note, "install NVIDIA's driver, if there is a GPU" if built_for else "")
        return
    yield Finding("driver", "ok", f"NVIDIA {driver}")
    if built_for is None:
        yield Finding("gpu", "note", f"torch {torch.__version__} is built without CUDA: GPUs stay unused", _CUDA_TORCH)
        return
    if not torch.cuda.is_available():
        yield Finding(
            "gpu",
            "note",
            f"torch, built for CUDA {built_for}, finds no GPU: the driver is too old for it, or CUDA_VISIBLE_DEVICES hides them",
            "nvidia-smi",
        )
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)
    yield from _kernels()


def _gpu(index: int) -> Finding:
    import torch

    from sapwood_common.errors import ConfigError
    from sapwood_worker.model.gpu import check_gpu, read_gpu

    gpu = read_gpu(torch.device("cuda", index))
    shown = f"{gpu.name}, {gpu.free / _GIB:.1f} of {gpu.total / _GIB:.1f} GiB free, SM {gpu.capability[0]}.{gpu.capability[1]}"
    try:
        warnings = check_gpu(gpu, dtype="auto", kv_cache_dtype="auto", quantization="none", memory_fraction=0.9)
    except ConfigError as error:
        return Finding(f"gpu {index}", "note", f"{shown}; a worker does not run on it: {error}", "--worker-device cpu")
    return Finding(f"gpu {index}", "note" if warnings else "ok", "; ".join([shown, *warnings]))


def _kernels() -> Iterator[Finding]:
    for package, distribution, use in (
        ("triton", "triton", "kernels on the GPU"),
        ("flashinfer", "flashinfer-python", "the fastest attention; without it Triton's is taken"),
    ):
        if importlib.util.find_spec(package) is None:
            yield Finding(package, "note", f"not installed: {use}", "pip install 'sapwood[gpu]'")
        else:
            yield Finding(package, "ok", metadata.version(distribution))
    for program, use in (("gcc", "Triton"), ("nvcc", "flashinfer"), ("ninja", "flashinfer")):
        if shutil.which(program) is None:
            note = f"not on PATH: {use} compiles with it what it does not bring along"
            yield Finding(program, "note", note, f"install {program}, or take docker/worker.Dockerfile")
