"""Triton: functions that kernels of states share. Everything is float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """``x * sigmoid(x)``."""
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, and x itself above 20 as torch has it."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    # Kahan's way: the quotient takes back what the sum with 1 has rounded away.
    log = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def window_inputs(x, window, channels, inside, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """The inputs of a short convolution: its window, then the newest input.

    Args:
        x: float32 [C]: the newest input of some channels.
        window: Where the inputs before lie: [channels, TAPS - 1].
        channels: [C]: which channels.
        inside: bool [C]: which of them there are.

    Returns:
        float32 [C, BLOCK_TAPS], 0 beyond TAPS.
    """
    taps = tl.arange(0, BLOCK_TAPS)[None]
    old = tl.load(window + channels[:, None] * (TAPS - 1) + taps, mask=inside[:, None] & (taps < TAPS - 1), other=0.0)
    return tl.where(taps == TAPS - 1, x[:, None], old)


@triton.jit
def convolved(every, weight, channels, inside, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """The output [C] of a short convolution with weights [channels, TAPS], of what :func:`window_inputs` returns."""
    taps = tl.arange(0, BLOCK_TAPS)[None]
    factors = tl.load(weight + channels[:, None] * TAPS + taps, mask=inside[:, None] & (taps < TAPS), other=0.0)
    return tl.sum(every * factors, axis=1)


@triton.jit
def shift_window(every, window, channels, inside, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """Writes the window for the next token; a barrier must come between it and :func:`window_inputs`."""
    taps = tl.arange(0, BLOCK_TAPS)[None]
    kept = inside[:, None] & (taps > 0) & (taps < TAPS)
    tl.store(window + channels[:, None] * (TAPS - 1) + taps - 1, every, mask=kept)


@triton.jit
def chunk_decays(logs, steps):
    """How much is left of what was there before a chunk of tokens, and of what its tokens wrote.

    Sums are float64, and differences of large ones are taken of their upper and lower halves: those of float32 would have lost
    their digits.

    Args:
        logs: float32 [T], at most 0: the logarithm of each token's factor.
        steps: [T]: 0, 1, 2, ...

    Returns:
        float32: after each token, of what was there before the first [T]; after the last, of what each wrote [T]; after the last,
        of what was there before; after token i, of what token j wrote [i, j], 0 for j > i.
    """
    wide = logs.to(tl.float64)
    total, last = tl.cumsum(wide, axis=0), tl.sum(wide, axis=0)
    upper = total.to(tl.float32)
    lower = (total - upper.to(tl.float64)).to(tl.float32)
    between = (upper[:, None] - upper[None, :]) + (lower[:, None] - lower[None, :])
    left = tl.where(steps[:, None] >= steps[None, :], tl.exp(tl.minimum(between, 0.0)), 0.0)
    return tl.exp(upper), tl.exp((last - total).to(tl.float32)), tl.exp(last.to(tl.float32)), left
