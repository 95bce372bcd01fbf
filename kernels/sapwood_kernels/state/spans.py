"""Prompts whose states advance in one step: where their tokens lie, and where states are written on the way.

A span is the tokens of a request in a step. A piece is a part of it, up to a token after which its state is written to a slot: a
snapshot's, or at last the request's own. A chunk is up to :data:`CHUNK` tokens of a piece. Invariants: the pieces of a span
follow each other without gaps, and the last ends with the span; no slot is both read and written by two spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]

CHUNK = 64
"""Tokens that are computed together."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The tables of a step, on the device.

    Attributes:
        spans: int32 [S, 5]: the request's slot, the first token's number in the step, the first piece, the piece behind the last,
            the first chunk.
        pieces: int32 [P, 2]: the token behind it, and the slot that the state is written to then.
        chunks: int32 [N, 3]: the first token, the token behind the last, and the span.
    """

    spans: Tensor
    pieces: Tensor
    chunks: Tensor


def tables(
    firsts: IntArray,
    counts: IntArray,
    slots: IntArray,
    saves: IntArray,
    to_device: Callable[[npt.NDArray[np.int32]], Tensor],
) -> Spans:
    """Builds the tables.

    Args:
        firsts: int64 [S]: each span's first token.
        counts: int64 [S]: its tokens, at least one.
        slots: int64 [S]: its request's slot.
        saves: int64 [X, 3]: a span, after how many of its tokens its state is saved, at least one, and the slot for it.
        to_device: Brings an array to the device.
    """
    cuts: list[list[tuple[int, int]]] = [[] for _ in range(len(firsts))]
    for span, after, slot in saves.tolist():
        cuts[span].append((after, slot))
    spans: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    chunks: list[tuple[int, ...]] = []
    for span, (first, count, slot) in enumerate(zip(firsts.tolist(), counts.tolist(), slots.tolist(), strict=True)):
        spans.append((slot, first, len(pieces), len(pieces) + len(cuts[span]) + 1, len(chunks)))
        begin = first
        for after, target in (*sorted(cuts[span]), (count, slot)):
            end = first + after
            pieces.append((end, target))
            chunks += [(at, min(at + CHUNK, end), span) for at in range(begin, end, CHUNK)]
            begin = end
    sizes = [5 * len(spans), 2 * len(pieces), 3 * len(chunks)]
    flat = np.concatenate([np.array(each, np.int32).ravel() for each in (spans, pieces, chunks)])
    on_device = torch.split(to_device(flat), sizes)  # one copy
    return Spans(on_device[0].view(-1, 5), on_device[1].view(-1, 2), on_device[2].view(-1, 3))
