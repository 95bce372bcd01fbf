"""Traces: when requests came, how long they were, and which blocks of their prompts they shared with others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sapwood.bench.data.conversation import Ask, Conversation, Conversations
from sapwood.bench.data.json_lines import DataError, read_json_lines, whole
from sapwood.bench.data.words import PromptMaker


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        at: Seconds after the trace's first request.
        inputs: Tokens of its prompt.
        outputs: Tokens of its answer.
        blocks: Names of its prompt's blocks, in order: equal names stand for equal tokens. Empty if the trace does not tell.
    """

    at: float
    inputs: int
    outputs: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRow]:
    """Reads JSON lines with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (tokens) and, if prompts have
    beginnings in common, ``hash_ids``: the format of Mooncake's traces.

    Raises:
        DataError: The file is of no use.
    """
    rows = []
    for place, found in read_json_lines(path):
        blocks = found.get("hash_ids") or []
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise DataError(f"{place}: hash_ids must be an array of whole numbers")
        outputs = max(1, whole(place, found, "output_length", least=0))
        rows.append(TraceRow(_seconds(place, found), whole(place, found, "input_length"), outputs, tuple(blocks)))
    rows.sort(key=lambda row: row.at)
    first = rows[0].at
    return [TraceRow(row.at - first, row.inputs, row.outputs, row.blocks) for row in rows]


def _seconds(place: str, found: dict[str, Any]) -> float:
    value = found.get("timestamp")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise DataError(f"{place}: timestamp must be a number of milliseconds, got {value!r}")
    return value / 1000


def trace_arrivals(rows: list[TraceRow], speed: float) -> Iterator[float]:
    """When the requests of a trace come, in seconds after the start; with speed 2 in half the time."""
    return (row.at / speed for row in rows)


def trace_prompts(rows: list[TraceRow], maker: PromptMaker, block_tokens: int, seed: int) -> Conversations:
    """Prompts of the trace's lengths, that share what the trace says they share.

    Args:
        rows: The trace.
        maker: Makes the texts.
        block_tokens: Tokens of each block that ``hash_ids`` name; the last of a prompt may be shorter.
        seed: The texts' seed.
    """
    blocks: dict[int, str | list[int]] = {}
    for number, row in enumerate(rows):
        rest = row.inputs
        parts = []
        for name in row.blocks:
            if rest < block_tokens:
                break
            if name not in blocks:
                blocks[name] = maker.make(random.Random(f"block {seed} {name}"), block_tokens)
            parts.append(blocks[name])
            rest -= block_tokens
        if rest > 0:
            own = row.blocks[len(parts)] if len(row.blocks) > len(parts) else f"request {number}"
            parts.append(maker.make(random.Random(f"rest {seed} {own}"), rest))
        yield Conversation((Ask(maker.join(parts), row.outputs),))
