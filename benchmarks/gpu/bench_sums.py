"""Sums over GPUs of one host: what is chosen at the start, by which times, and what the sums of a decode take with it.

A part that starts is tried as in a worker: its sums have to be exact, in CUDA graphs too, or standard error says why it is not
used. Prints one JSON object a line; seconds are the slowest rank's.

    python benchmarks/gpu/bench_sums.py --sizes 2,4
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from commit import measured_commit
from torch import Tensor

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed.calibration import time_on_host
from sapwood_worker.model.distributed.own_sums import choose_sums
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups
from sapwood_worker.model.distributed.trial_cases import TrialNorm

WIDTH, CHAIN = 8192, 16
"""Numbers of a row, as in the 70B's shape, and sums of a chain that is timed."""


def measure(rank: int, size: int, folder: str, device_type: str) -> None:
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    device, timer = torch.device("cpu"), time_on_host
    if device_type == "cuda":
        from sapwood_worker.model.distributed.peer_sums import time_on_gpu  # it needs Triton

        device, timer = torch.device("cuda", rank), time_on_gpu
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    parallel = join_groups(rank, tensor=size, rendezvous=f"file://{folder}/meet", backend=backend, timeout=120)
    choose_sums(parallel, "auto", device, size, 120.0)
    group = parallel.tp
    assert isinstance(group, TorchGroup)
    table, about = group.sums, {"ranks": size, "commit": measured_commit()}
    if rank == 0:
        times = {f"{each.method} {each.num_bytes}": round(each.seconds * 1e6, 2) for each in table.report.times}
        print(json.dumps({"what": "sums", "chosen": table.report.words, "us": times} | about), flush=True)
    norm = TrialNorm(WIDTH, device_ops(device), torch.bfloat16)
    for rows in (1, 8, 64, 256):
        x, residual = torch.zeros(2, rows, WIDTH, dtype=torch.bfloat16, device=device).unbind()

        def normed(x: Tensor = x, residual: Tensor = residual) -> None:
            if table.add(x, residual, norm) is None:
                norm(residual)

        def apart(x: Tensor = x, residual: Tensor = residual) -> None:
            group.backend.sum(x)
            residual.add_(x)
            norm(residual)

        calls = {
            "backend": lambda x=x: group.backend.sum(x),
            "chosen": lambda x=x: table(x),
            "backend, residual, norm": apart,
            "chosen with residual and norm": normed,
        }
        own = {name: timer(lambda call=call: [call() for _ in range(CHAIN)]) / CHAIN for name, call in calls.items()}  # type: ignore[misc]
        every = group.exchange(own)
        if rank == 0:
            slowest = {name: round(max(each[name] for each in every) * 1e6, 2) for name in own}
            print(json.dumps({"what": f"sums of {rows} x {WIDTH} bfloat16", "us": slowest} | about), flush=True)
    if rank == 0:
        print(json.dumps({"what": "sums counted", "counts": table.counts()} | about), flush=True)
    group.exchange("")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2", help="Numbers of GPUs (default: 2).")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: processes (default: cuda).")
    arguments = parser.parse_args()
    for size in map(int, arguments.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(measure, (size, folder, arguments.device), nprocs=size)


if __name__ == "__main__":
    main()
