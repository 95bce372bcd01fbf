"""The sampling settings of a step's requests as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Settings of the S rows of R that are not greedy.

    Attributes:
        rows: int64 [S]: which rows; None when all R.
        count: S.
        temperature: float32 [S, 1], over 0.
        top_k: int64 [S, 1], in 1 .. vocabulary size.
        top_p: float64 [S, 1].
        min_p: float32 [S, 1].
        uniform: float64 [S, 1]: each row's random number.
        most_k: The largest of ``top_k`` below the vocabulary size; 0 when no row has one.
        any_top_p: Whether some row's is below 1.
    """

    rows: Tensor | None
    count: int
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    most_k: int
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of S rows of R.

    Attributes:
        rows: int64 [S]: which rows of the logits.
        slots: int64 [S]: which rows of the page table, by which tokens are counted.
        frequency: float32 [S, 1].
        presence: float32 [S, 1].
        repetition: float32 [S, 1], over 0.
    """

    rows: Tensor
    slots: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True)
class Additions:
    """Numbers to add to single logits.

    Attributes:
        at: int64 [N]: index into the flattened logits; one that is there twice has 0 added but for one time.
        values: float32 [N].
    """

    at: Tensor
    values: Tensor
