"""Steps written by hand: one part for each request, as a scheduler would plan them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sapwood_common.contract.sampling import SamplingParams
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import Pooling
from sapwood_worker.records.step import Copies, Entry, Step


@dataclass(slots=True)
class Part:
    """What a step computes of one request.

    Attributes:
        row: Its row of the page table.
        token_ids: The tokens to compute.
        start: How many tokens before them have their KV in the cache already.
        samples: After how many of them, the last, to sample.
        sampling: How.
        enters: Whether the row gets the request with this step.
        history: Prompt and output so far.
        output_start, prompt_length, prompt_logprobs, pooling, lora_slot: As in :class:`~sapwood_worker.records.step.Entry`.
    """

    row: int
    token_ids: list[int]
    start: int
    samples: int
    sampling: SamplingParams
    enters: bool = True
    history: array[int] = field(default_factory=lambda: array("I"))
    output_start: int = 0
    prompt_length: int = 0
    prompt_logprobs: int | None = None
    pooling: Pooling = ""
    lora_slot: int = -1


def step_for(
    info: ModelInfo, number: int, table: npt.NDArray[np.int32], parts: Sequence[Part] = (), copies: Copies | None = None
) -> Step:
    """The step of these parts for a model that may have several page tables, each of which names the same pages."""
    step = make_step(number, table, parts, copies)
    step.pages = np.tile(step.pages, (1, 1 + len(info.windows)))
    return step


def make_step(
    number: int, table: npt.NDArray[np.int32], parts: Sequence[Part] = (), copies: Copies | None = None
) -> Step:
    """The step of these parts, whose pages are in the rows of ``table``."""
    rows = np.array([part.row for part in parts], np.int64)
    return Step(
        number,
        rows=rows,
        starts=np.array([part.start for part in parts], np.int64),
        counts=np.array([len(part.token_ids) for part in parts], np.int64),
        samples=np.array([part.samples for part in parts], np.int64),
        token_ids=np.array([token for part in parts for token in part.token_ids], np.int64),
        pages=table[rows],
        entries=tuple(map(_entry, (part for part in parts if part.enters))),
        copies=copies,
    )


def _entry(part: Part) -> Entry:
    return Entry(
        part.row,
        part.row,
        part.sampling,
        part.output_start,
        part.history.tobytes(),
        part.prompt_length,
        part.prompt_logprobs,
        part.pooling,
        part.lora_slot,
    )
