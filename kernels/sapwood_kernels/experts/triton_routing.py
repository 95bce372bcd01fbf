"""Triton: ``routing.route`` in one launch, which also counts what each expert gets.

A program takes a token, whose scores stay in registers. Plain torch takes a dozen launches, in each layer of each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.experts.routing import Routing


@triton.jit(do_not_specialize=["of_rank"])
def _route_kernel(
    logits, correction, live, ids, weights, counts, of_rank, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, TWO_BEST: tl.constexpr,
    CORRECTED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert, nth = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    inside = expert < EXPERTS
    scores = tl.load(logits + token.to(tl.int64) * EXPERTS + expert, mask=inside, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    eligible = scores
    if CORRECTED:
        eligible += tl.load(correction + expert, mask=inside, other=0.0)
    eligible = tl.where(inside, eligible, float("-inf"))
    if GROUPS > CHOSEN_GROUPS:
        number, group = tl.arange(0, BLOCK_GROUPS), expert // (EXPERTS // GROUPS)
        of_group = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
        for each in tl.static_range(GROUPS):
            members = tl.where(group == each, eligible, float("-inf"))
            best = tl.max(members, axis=0)
            if TWO_BEST:
                best += tl.max(tl.where(expert == tl.argmax(members, axis=0), float("-inf"), members), axis=0)
            of_group = tl.where(number == each, best, of_group)
        allowed = expert < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            best_group = tl.argmax(of_group, axis=0)
            allowed = allowed | (group == best_group)
            of_group = tl.where(number == best_group, float("-inf"), of_group)
        eligible = tl.where(allowed, eligible, float("-inf"))
    chosen = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    weight = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for each in tl.static_range(CHOSEN):
        # What is no number may be no expert's either: the last stands in.
        best_expert = tl.minimum(tl.argmax(eligible, axis=0), EXPERTS - 1).to(tl.int32)
        chosen = tl.where(nth == each, best_expert, chosen)
        weight = tl.where(nth == each, tl.sum(tl.where(expert == best_expert, scores, 0.0), axis=0), weight)
        eligible = tl.where(expert == best_expert, float("-inf"), eligible)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)  # a sum of sigmoids may be 0
    wanted = nth < CHOSEN
    counted = nth < tl.where(token % of_rank < tl.load(live + token // of_rank), CHOSEN, 0)
    at = token * CHOSEN + nth
    tl.store(ids + at, tl.where(counted, chosen, EXPERTS), mask=wanted)
    tl.store(weights + at, weight * SCALE, mask=wanted)
    tl.atomic_add(counts + chosen, tl.full((BLOCK_CHOSEN,), 1, tl.int64), mask=counted, sem="relaxed")


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None, counts: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes ``routing.route`` of rows that are tokens; the others, which pad a step, go to expert E, which there is not.

    Args:
        logits: float32 [T, E], contiguous.
        routing: How experts are chosen.
        correction: float32 [E]; None: 0.
        counts: int64 [E]: what each expert gets is added, in place.
        live: int32 [N]: of N ranks' rows, one rank's after the other's, how many of each rank's first ones are tokens.

    Returns:
        The experts, int32 [T, k], and their weights, float32 [T, k].
    """
    tokens = len(logits)
    ids = torch.empty(tokens, routing.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.chosen, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(routing.experts)
    _route_kernel[(tokens,)](
        logits, logits if correction is None else correction, live, ids, weights, counts, -(-tokens // len(live)),
        EXPERTS=routing.experts, CHOSEN=routing.chosen, SIGMOID=routing.scores == "sigmoid", RENORMALISE=routing.renormalise,
        SCALE=float(routing.scale), GROUPS=routing.groups, CHOSEN_GROUPS=routing.chosen_groups,
        TWO_BEST=routing.group_score == "two_best", CORRECTED=correction is not None, BLOCK=block,
        BLOCK_GROUPS=triton.next_power_of_2(routing.groups), BLOCK_CHOSEN=triton.next_power_of_2(routing.chosen),
        num_warps=1 if block <= 128 else 2,
    )  # fmt: skip
    return ids, weights
