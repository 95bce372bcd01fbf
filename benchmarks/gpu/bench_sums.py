"""Sums over GPUs of one host: what is chosen at the start, and what each method takes for the rows of a decode.

A part that starts is tried as in a worker: its sums have to be exact, in CUDA graphs too, or standard error says why it is not
used. Prints one JSON object a line, then a table: microseconds of the slowest rank in a CUDA graph, and the least that the link
could take. 2 and 4 GPUs take less than a minute.

    python benchmarks/gpu/bench_sums.py --sizes 2,4
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from commit import measured_commit
from torch import Tensor

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed.all_reduce import NormedMethod, SumMethod
from sapwood_worker.model.distributed.calibration import TrialNorm, time_on_host
from sapwood_worker.model.distributed.custom_all_reduce import choose_sums
from sapwood_worker.model.distributed.torch_group import TorchGroup, join_groups

WIDTH, CHAIN = 8192, 16
"""Numbers of a row, as in the 70B's shape, and sums of a chain that is timed."""
ROWS = 1, 8, 32, 64, 256
LINK = 450e9
"""Bytes that a GPU can send in a second: NVLink of H100 and H200."""


def measure(rank: int, size: int, folder: str, device_type: str) -> None:
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    device, timer = torch.device("cpu"), time_on_host
    plain: Sequence[SumMethod] = ()
    fused: Sequence[NormedMethod] = ()
    if device_type == "cuda":
        from sapwood_worker.model.distributed.peer_all_reduce import make_peer_sums, time_on_gpu  # it needs Triton

        device, timer = torch.device("cuda", rank), time_on_gpu
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    parallel = join_groups(rank, tensor=size, rendezvous=f"file://{folder}/meet", backend=backend, timeout=120)
    choose_sums(parallel, "auto", device, size, 120.0)
    group = parallel.tp
    assert isinstance(group, TorchGroup)
    if device_type == "cuda":
        plain, fused = make_peer_sums(group, device)
    table, about = group.sums, {"ranks": size, "commit": measured_commit()}
    if rank == 0:
        times = {f"{each.method} {each.num_bytes}": round(each.seconds * 1e6, 2) for each in table.report.times}
        print(json.dumps({"what": "sums", "chosen": table.report.words, "us": times} | about), flush=True)
    norm = TrialNorm(WIDTH, device_ops(device), torch.bfloat16)
    lines = []
    for rows in ROWS:
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
            **{each.name: lambda x=x, each=each: each.sum(x) for each in plain if x.nbytes <= each.most_bytes},
            "chosen": lambda x=x: table(x),
            "backend+norm": apart,
            **{
                each.name: lambda x=x, residual=residual, each=each: each.add(x, residual, norm)
                for each in fused
                if each.takes(x, residual)
            },
            "chosen+norm": normed,
        }
        own = {name: timer(lambda call=call: [call() for _ in range(CHAIN)]) / CHAIN for name, call in calls.items()}  # type: ignore[misc]
        every = group.exchange(own, dict[str, float])
        slowest = {name: round(max(each[name] for each in every) * 1e6, 2) for name in own}
        slowest["link"] = round(min(size - 1, 2 * (size - 1) / size) * x.nbytes / LINK * 1e6, 2)
        lines.append((rows, slowest))
        if rank == 0:
            print(json.dumps({"what": f"sums of {rows} x {WIDTH} bfloat16", "us": slowest} | about), flush=True)
    if rank == 0:
        names = list(dict.fromkeys(name for _, found in lines for name in found))
        print(f"{size} ranks, us: rows", *names, sep=" | ")
        for rows, found in lines:
            print(rows, *(f"{found[name]:.1f}" if name in found else "-" for name in names), sep=" | ", flush=True)
    if rank == 0:
        print(json.dumps({"what": "sums counted", "counts": table.counts()} | about), flush=True)
    group.exchange("", str)
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
