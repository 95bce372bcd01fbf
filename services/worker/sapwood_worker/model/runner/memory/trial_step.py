"""A step of made-up prompts, to see what it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.input_builder import build_forward_batch
from sapwood_worker.records.step import Step


@torch.inference_mode()
def compute_trial(
    prompts: Sequence[int], model: DecoderModel, pool: DevicePool, backend: PagedAttention, ops: DeviceOps
) -> Tensor:
    """The hidden states of prompts of so many tokens each, in the pool's first pages."""
    counts = np.array(prompts, np.int64)
    needed = -(-counts // pool.page_size)
    table = np.zeros((len(counts), needed.max()), np.int32)
    table[np.arange(needed.max()) < needed[:, None]] = np.arange(needed.sum())
    slots, zeros = np.arange(len(counts)), np.zeros_like(counts)
    tokens = np.zeros(counts.sum(), np.int64)
    step = Step(0, slots, starts=zeros, counts=counts, samples=zeros + 1, token_ids=tokens)
    step.pages = np.tile(table, (1, len(pool.counts)))
    batch = build_forward_batch(step, pool.page_size, ops, tables=len(pool.counts))
    hidden: Tensor = model(batch.token_ids, batch.positions, backend.plan(batch.attention))
    return hidden
