"""Triton: a router's logits in float32 of 16-bit rows, which need not be widened first; ``routing.route`` of them in one launch,
which also counts the rows of each expert; and the slots of the chosen experts.

torch's product in float32 runs on no tensor cores, in a few programs for the rows of a decode, after a launch that widens them.
Here few rows are multiplied as they are read, by programs that have two experts each, and normed first if that is wanted; more
on tensor cores. The products of one sum follow each other there, so the inputs of a decode's rows are shared out to programs,
whose sums anybody who chooses adds up. Where the weight's numbers are 16-bit ones, as most checkpoints have them, products are
exact and sums in float32: a decode's rows meet a program's part of the weight, which has come before the kernel ahead has ended,
and many rows are multiplied by cuBLAS, 18 instead of 74 us for 8192 tokens and 128 experts on an H100, 7 instead of 53 for 1024.
Numbers of other weights are taken as sums of two of TF32's, which rounds about as float32 does.
Bound: one read of the rows and of the weight. Of a choice a program takes a token, whose scores stay in registers. Plain torch
takes a dozen launches for it, in each layer of each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sapwood_kernels import dependent_launch
from sapwood_kernels.experts.routing import Routing

FEW = 16
"""Rows up to which no tensor cores are used."""
_FEW_EXPERTS = 2
_DECODED = 512
_HEIGHT, _DEPTH, _SHARES = 16, 256, 8
"""Of a decode's rows and a weight of 16 bits: rows of a program, numbers at a time, and shares of the inputs."""
TILES = (64, 16, 64, 3, 8), (64, 64, 32, 3, 1)
"""Rows, experts, numbers at a time, stages and shares of the inputs, of up to 512 rows and of more."""


@triton.jit(do_not_specialize=["T"])
def _few_logits_kernel(
    x, weight, bias, norm, normed, out, T, eps, EXPERTS: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = experts < EXPERTS
    at = tl.arange(0, BLOCK_K)
    deep = at < K
    if PDL:
        gdc_launch_dependents()
    part = tl.load(weight + experts[:, None] * K + at[None, :], mask=inside[:, None] & deep[None, :], other=0.0)
    factors = at.to(tl.float32)
    if HAS_NORM:
        factors = tl.load(norm + at, mask=deep, other=0.0)
    if PDL:
        gdc_wait()
    taken = tl.load(x + row * K + at, mask=deep, other=0.0)
    if HAS_NORM:
        values = taken.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
        taken = (values * scale * factors).to(taken.dtype)  # rounded as in two passes
        if tl.program_id(1) == 0:
            tl.store(normed + row * K + at, taken, mask=deep)
    result = tl.sum(part * taken.to(tl.float32)[None, :], axis=1)
    if HAS_BIAS:
        result += tl.load(bias + experts, mask=inside, other=0.0)
    tl.store(out + row * EXPERTS + experts, result, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _narrow_logits_kernel(
    x, weight, bias, out, T, EXPERTS: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    there, inside = rows < T, experts < EXPERTS
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    begin, end = steps * share // SHARES, steps * (share + 1) // SHARES
    if PDL:
        gdc_launch_dependents()
    of_expert = weight + experts[:, None] * K
    at = begin * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.load(of_expert + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(begin, end):
        here = part
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        after = at + BLOCK_K
        further = after < tl.minimum(K, end * BLOCK_K)
        part = tl.load(of_expert + after[None, :], mask=inside[:, None] & further[None, :], other=0.0)
        row = x + rows.to(tl.int64)[:, None] * K
        taken = tl.load(row + at[None, :], mask=there[:, None] & (at < K)[None, :], other=0.0)
        total = tl.dot(here, tl.trans(taken), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + experts, mask=experts < tl.where(share == 0, EXPERTS, 0), other=0.0)[:, None]
    target = out + (rows.to(tl.int64)[None, :] * SHARES + share) * EXPERTS + experts[:, None]
    tl.store(target, total, mask=there[None, :] & inside[:, None])


@triton.jit(do_not_specialize=["T"])
def _many_logits_kernel(
    x, weight, bias, out, T, EXPERTS: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    experts = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    there, inside = rows < T, experts < EXPERTS
    row = x + rows.to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for step in range(steps * share // SHARES, steps * (share + 1) // SHARES):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        deep = at < K
        taken = tl.load(row[:, None] + at[None, :], mask=there[:, None] & deep[None, :], other=0.0).to(tl.float32)
        part = tl.load(weight + experts[None, :] * K + at[:, None], mask=inside[None, :] & deep[:, None], other=0.0)
        total = tl.dot(taken, part, total, input_precision="tf32x3")
    if HAS_BIAS:
        total += tl.load(bias + experts, mask=experts < tl.where(share == 0, EXPERTS, 0), other=0.0)[None, :]
    target = out + (rows.to(tl.int64)[:, None] * SHARES + share) * EXPERTS + experts[None, :]
    tl.store(target, total, mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["COUNT", "first"])
def _turns_kernel(
    table, copies, ids, out, COUNT, first, CHOSEN: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT
    expert = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    turn = (first + at // CHOSEN) % tl.load(copies + expert, mask=inside, other=1)
    tl.store(out + at, tl.load(table + expert * RANKS + turn, mask=inside, other=0).to(tl.int32), mask=inside)


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A router's weight, float32, as numbers of 16 bits, which most checkpoints have it in; None: it would be another."""
    found = weight.to(dtype)
    return found if dtype.itemsize == 2 and torch.equal(found.float(), weight) else None


def logits(x: Tensor, weight: Tensor, bias: Tensor | None, narrow: Tensor | None = None) -> Tensor:
    """``x.float() @ weight.T + bias``: [T, K], float32 [E, K] and [E] -> float32 [T, E], or parts of it, [T, S, E].

    ``narrow``: the weight in x's dtype, if its numbers are the same.
    """
    (rows, width), experts = x.shape, len(weight)
    if rows <= FEW:
        return _few(x, weight, bias, None)[1]
    if narrow is not None and x.dtype == narrow.dtype:
        if rows <= _DECODED:
            return _narrow(x, narrow, bias)
        found = torch.mm(x, narrow.t(), out_dtype=torch.float32)
        return found if bias is None else found.add_(bias)
    height, wide, depth, stages, shares = TILES[rows > _DECODED]
    shape = (rows, experts) if shares == 1 else (rows, shares, experts)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    _many_logits_kernel[(triton.cdiv(rows, height), triton.cdiv(experts, wide), shares)](
        x.contiguous(), weight, weight if bias is None else bias, out, rows, EXPERTS=experts, K=width, HAS_BIAS=bias is not None,
        BLOCK_M=height, BLOCK_N=wide, BLOCK_K=depth, SHARES=shares, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def normed_logits(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Up to ``FEW`` rows after ``reference.rms_norm`` by a weight float32 [K], and their :func:`logits`, in one launch."""
    return _few(x, weight, bias, (norm, eps))


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, norm: tuple[Tensor, float] | None) -> tuple[Tensor, Tensor]:
    """Rows, normed if that is wanted, and their logits."""
    (rows, width), experts = x.shape, len(weight)
    x = x.contiguous()
    out = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    normed = x if norm is None else torch.empty_like(x)
    factors, eps = (weight, 0.0) if norm is None else norm
    _few_logits_kernel[(rows, triton.cdiv(experts, _FEW_EXPERTS))](
        x, weight, weight if bias is None else bias, factors, normed, out, rows, eps, EXPERTS=experts, K=width,
        HAS_BIAS=bias is not None, HAS_NORM=norm is not None, BLOCK_N=_FEW_EXPERTS, BLOCK_K=triton.next_power_of_2(width),
        num_warps=4 if width <= 4096 else 8, **dependent_launch.options(x, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return normed, out


def _narrow(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Parts of the logits of a decode's rows by a weight of their dtype."""
    (rows, width), experts = x.shape, len(weight)
    wide = max(16, min(128, triton.next_power_of_2(experts)))
    shares = min(_SHARES, triton.cdiv(width, _DEPTH))
    out = torch.empty(rows, shares, experts, dtype=torch.float32, device=x.device)
    _narrow_logits_kernel[(triton.cdiv(rows, _HEIGHT), triton.cdiv(experts, wide), shares)](
        x.contiguous(), weight, out if bias is None else bias, out, rows, EXPERTS=experts, K=width, HAS_BIAS=bias is not None,
        BLOCK_M=_HEIGHT, BLOCK_N=wide, BLOCK_K=_DEPTH, SHARES=shares, num_warps=8,
        **dependent_launch.options(x, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return out


def turns(table: Tensor, copies: Tensor, ids: Tensor, first: int) -> Tensor:
    """``ops.turns``, in one launch: int32, of contiguous ids."""
    out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    _turns_kernel[(triton.cdiv(ids.numel(), 256),)](
        table, copies, ids, out, ids.numel(), first, CHOSEN=ids.shape[1], RANKS=table.shape[1], BLOCK=256, num_warps=2
    )
    return out


@triton.jit(do_not_specialize=["of_rank"])
def _route_kernel(
    logits, correction, live, ids, weights, counts, of_rank, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, TWO_BEST: tl.constexpr,
    CORRECTED: tl.constexpr, SHARES: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    expert, nth = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    inside = expert < EXPERTS
    of_shares = logits + token.to(tl.int64) * SHARES * EXPERTS + expert
    scores = tl.load(of_shares, mask=inside, other=float("-inf"))
    for share in tl.static_range(1, SHARES):
        scores += tl.load(of_shares + share * EXPERTS, mask=inside, other=0.0)
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
        best_score, best_expert = tl.max(eligible, axis=0, return_indices=True)
        # A NaN may give an invalid expert: the last expert replaces it.
        best_expert = tl.minimum(best_expert, EXPERTS - 1).to(tl.int32)
        chosen = tl.where(nth == each, best_expert, chosen)
        if CORRECTED:
            best_score = tl.sum(tl.where(expert == best_expert, scores, 0.0), axis=0)
        weight = tl.where(nth == each, best_score, weight)
        eligible = tl.where(expert == best_expert, float("-inf"), eligible)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)  # a sum of sigmoids may be 0
    weight *= SCALE
    if SHARED > 0:  # behind the chosen experts come those that all tokens go to
        chosen = tl.where(nth < CHOSEN, chosen, EXPERTS - CHOSEN + nth)
        weight = tl.where(nth < CHOSEN, weight, 1.0)
    wanted, token_lives = nth < CHOSEN + SHARED, token % of_rank < tl.load(live + token // of_rank)
    counted = nth < tl.where(token_lives, CHOSEN, 0)
    at = token * (CHOSEN + SHARED) + nth
    tl.store(ids + at, tl.where(token_lives, chosen, EXPERTS + SHARED), mask=wanted)
    tl.store(weights + at, weight, mask=wanted)
    tl.atomic_add(counts + chosen, tl.full((BLOCK_CHOSEN,), 1, tl.int64), mask=counted, sem="relaxed")


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None, counts: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes ``routing.route`` of rows that are tokens; the others, which pad a step, go to the expert after the last, which is
    none.

    Args:
        logits: float32 [T, E], or parts of them, [T, S, E]; contiguous.
        routing: How experts are chosen.
        correction: float32 [E]; None: 0.
        counts: int64 [E]: what each expert gets is added, in place.
        live: int32 [N]: of N ranks' rows, one rank's after the other's, how many of each rank's first ones are tokens.

    Returns:
        The experts, int32 [T, k + shared], and their weights, float32 [T, k + shared].
    """
    tokens, each = len(logits), routing.chosen + routing.shared
    ids = torch.empty(tokens, each, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, each, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(routing.experts)
    _route_kernel[(tokens,)](
        logits, logits if correction is None else correction, live, ids, weights, counts, -(-tokens // len(live)),
        EXPERTS=routing.experts, CHOSEN=routing.chosen, SIGMOID=routing.scores == "sigmoid", RENORMALISE=routing.renormalise,
        SCALE=float(routing.scale), GROUPS=routing.groups, CHOSEN_GROUPS=routing.chosen_groups,
        TWO_BEST=routing.group_score == "two_best", CORRECTED=correction is not None,
        SHARES=1 if logits.dim() == 2 else logits.shape[1], SHARED=routing.shared, BLOCK=block,
        BLOCK_GROUPS=triton.next_power_of_2(routing.groups), BLOCK_CHOSEN=triton.next_power_of_2(each),
        num_warps=1 if block <= 128 else 2, **dependent_launch.options(logits, dependent_launch.MIXTURE_ROWS),
    )  # fmt: skip
    return ids, weights
