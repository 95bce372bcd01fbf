"""A rank's share of a tiny model, in a thread or a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sapwood_kernels.ops.factory import device_ops
from sapwood_worker.model.distributed.group import Group
from sapwood_worker.model.distributed.parallel import Parallel
from sapwood_worker.model.distributed.torch_group import join_groups
from sapwood_worker.model.families.family import attention_layout
from sapwood_worker.model.loader import LoadedModel, load_model
from sapwood_worker.model.runner.kv_calibration import TrialPlan

CPU = torch.device("cpu")
# More heads than four ranks, fewer key heads; a vocabulary that two and four do not divide.
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


def load(path: Path, parallel: Parallel | None = None, quantization: str = "none") -> LoadedModel:
    """Loads a rank's part of a model, or all of it."""
    return load_model(
        path, "auto", torch.float32, device_ops("cpu"), context_length=None, threads=1, seed=0,
        quantization=quantization, parallel=parallel,
    )  # fmt: skip


def logits_of(loaded: LoadedModel, tokens: list[int], parallel: Parallel | None = None) -> Tensor:
    """Logits after every token, float32 [T, vocab]."""
    layout = attention_layout(loaded.config, "float32", page_size=16).stage(loaded.model.own)
    layout = layout.shard((parallel or Parallel()).tp.size)
    plan = TrialPlan(layout, len(tokens), torch.float32, CPU)
    with torch.inference_mode():
        hidden = loaded.model(torch.tensor(tokens), torch.arange(len(tokens)), plan)
        return loaded.model.logits(hidden).float()


def rank_process(rank: int, folder: Path, paths: list[Path], tokens: list[int], *layouts: dict[str, Any]) -> None:
    """A process: for each layout joins the others, tries the groups' exchanges and saves its logits of each model."""
    torch.set_num_threads(1)
    found = []
    for number, layout in enumerate(layouts):
        rendezvous = f"file://{folder}/meeting-{number}"
        parallel = join_groups(rank, **layout, rendezvous=rendezvous, backend="gloo", timeout=60)
        groups = {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "ep": parallel.ep}
        exchanged = {name: exchange(group, float(rank)) for name, group in groups.items()}
        split = replace(parallel, ep=Group())  # each rank has a part of every expert
        found.append((exchanged, [logits_of(load(path, split), tokens, split) for path in paths]))
        torch.distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


def exchange(group: Group, number: float) -> dict[str, list[float]]:
    """What a rank that comes with ``number`` gets of each exchange."""
    mine = torch.tensor([number])
    return {
        "sum": group.all_reduce(mine.clone()).tolist(),
        "all": group.all_gather(mine).tolist(),
        "mine of the sum": group.reduce_scatter(torch.arange(float(group.size)) + number).tolist(),
        "last's": group.broadcast(mine.clone(), source=group.size - 1).tolist(),
    }
