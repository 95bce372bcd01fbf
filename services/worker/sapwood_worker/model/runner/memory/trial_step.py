"""A step of made-up prompts, to see what it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.attention.cudnn_lengths import lengths
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.paged import PagedAttention
from sapwood_worker.model.attention.shared_prefix import LEAST_SPARED
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.pools.device_pool import DevicePool
from sapwood_worker.model.runner.forward_batch import ForwardBatch
from sapwood_worker.model.runner.input_builder import build_forward_batch
from sapwood_worker.records.step import Step


@torch.inference_mode()
def compute_trial(
    prompts: Sequence[int],
    model: DecoderModel,
    pool: DevicePool,
    backend: PagedAttention,
    ops: DeviceOps,
    common: int = 0,
) -> Tensor:
    """The hidden states of prompts of so many tokens each, in the pool's first pages.

    Args:
        prompts: Tokens of each.
        model: Computes them.
        pool: Whose pages are written.
        backend: The model's attention.
        ops: The device's operations.
        common: Pages, the pool's first, that come before all of them.
    """
    batch = _batch(prompts, pool, ops, common)
    hidden: Tensor = model(batch.token_ids, batch.positions, backend.plan(batch.attention))
    return hidden


def _batch(prompts: Sequence[int], pool: DevicePool, ops: DeviceOps, common: int = 0) -> ForwardBatch:
    counts = np.array(prompts, np.int64)
    needed = -(-counts // pool.page_size)
    table = np.zeros((len(counts), needed.max()), np.int32)
    table[np.arange(needed.max()) < needed[:, None]] = np.arange(needed.sum()) + common
    table = np.concatenate((np.tile(np.arange(common, dtype=np.int32), (len(counts), 1)), table), 1)
    slots, zeros = np.arange(len(counts)), np.zeros_like(counts)
    tokens = np.zeros(counts.sum(), np.int64)
    starts = zeros + common * pool.page_size
    step = Step(0, slots, starts=starts, counts=counts, samples=zeros + 1, token_ids=tokens)
    step.pages = np.tile(table, (1, len(pool.counts)))
    return build_forward_batch(step, pool.page_size, ops, tables=len(pool.counts))


def compute_shared_trial(
    longest: int, model: DecoderModel, pool: DevicePool, backend: PagedAttention, ops: DeviceOps
) -> None:
    """Computes short prompts with so much in common that it is read once, if that fits in the pool and in ``longest`` tokens.

    What it takes to compile for them is then there when the first such requests come.
    """
    pages = -(-LEAST_SPARED // pool.page_size)
    if backend.shares_prompts and pages + 2 < min(pool.counts) and (pages + 1) * pool.page_size <= longest:
        compute_trial([2, 2], model, pool, backend, ops, common=pages)
        backend.take_spared()


@torch.inference_mode()
def plan_prompts(
    most: int, model: DecoderModel, pool: DevicePool, backend: PagedAttention, ops: DeviceOps
) -> list[int]:
    """Has a layer compute a prompt of each length, up to ``most`` tokens, for which its attention is planned once.

    The thread that asks is the one whose steps find the plans. Returns the lengths; O(lengths) launches of a layer.
    """
    windows, least = model.config.windows, backend.plans_from
    whole = [place for place, index in enumerate(model.own) if windows[index] is None]
    if least is None or not whole:
        return []
    planned = [min(length, most) for length in lengths(least, most)]
    for count in planned:
        batch = _batch([count], pool, ops)
        hidden = torch.zeros(count, model.config.hidden_size, dtype=backend.shape.dtype, device=ops.device)
        model.run_layer(whole[0], hidden, backend.plan(batch.attention))
    return planned
