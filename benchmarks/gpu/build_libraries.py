"""Compiles FlashInfer's libraries for a shape, as its worker would while it serves; says how long that took.

python benchmarks/gpu/build_libraries.py --model benchmarks/gpu/configs/llama-3.1-8b
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.compiled_kernels import begin_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder with a config.json.")
    model = parser.parse_args().model
    build = begin_kernels(model, "auto", 16, torch.bfloat16, device_ops("cuda"), float8=False)
    if build is None:
        print("# there is nothing to compile")
        return
    build.wait(lambda said: print(f"# {said}", flush=True))
    print(f"# compiled in {build.seconds:.0f} s")


if __name__ == "__main__":
    main()
