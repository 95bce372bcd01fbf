"""A benchmark's result as lines for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from sapwood.bench.benchmark import LevelResult, Result
from sapwood.bench.measures import Measures, Spread
from sapwood.bench.targets.record import Record

SPREADS = {"ttft": "TTFT", "itl": "inter-token", "tpot": "per output token", "e2e": "end-to-end"}
"""The measures of time, and how people call them."""
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def level_lines(found: LevelResult, slo: object) -> list[str]:
    """A load's figures."""
    measures = found.measures
    head = f"{found.level}: {measures.requests} requests in {measures.seconds:.1f} s, {measures.succeeded} succeeded"
    if measures.failed:
        head += f", {measures.failed} FAILED"
    if measures.interrupted:
        head += f", {measures.interrupted} interrupted"
    lines = [head]
    if measures.ttft is not None or measures.e2e is not None:
        lines.append(f"  {'milliseconds':<18}" + "".join(f"{name:>10}" for name in _COLUMNS))
    for name, title in SPREADS.items():
        if (spread := spread_of(measures, name)) is not None:
            lines.append(f"  {title:<18}" + "".join(f"{value * 1000:>10.1f}" for value in columns(spread)))
    lines += [f"  {title:<18}{text}" for title, text in facts(measures, slo)]
    return lines


def facts(measures: Measures, slo: object) -> list[tuple[str, str]]:
    """The figures that are printed with the times, each with its title."""
    rate = measures.rate
    found = [("requests", f"{rate(measures.succeeded):.2f} /s")]
    answered = measures.succeeded - measures.without_usage
    if answered:
        cached = measures.cached_tokens
        share = "" if cached is None or not measures.input_tokens else f", {cached / measures.input_tokens:.0%} cached"
        each = measures.input_tokens / answered
        found.append(("input tokens", f"{rate(measures.input_tokens):.1f} /s ({each:.1f} a request{share})"))
        each = measures.output_tokens / answered
        piece = (
            f", {measures.output_tokens / measures.pieces:.2f} a piece"
            if measures.pieces and answered == measures.succeeded
            else ""
        )
        found.append(("output tokens", f"{rate(measures.output_tokens):.1f} /s ({each:.1f} a request{piece})"))
    if measures.good is not None:
        complete = measures.requests - measures.interrupted
        share = f"{measures.good / complete:.1%}" if complete else "none"
        found.append(("goodput", f"{rate(measures.good):.2f} requests/s, {share} keep {slo}"))
    if measures.invalid_json is not None and measures.succeeded:
        valid = measures.succeeded - measures.invalid_json
        found.append(("valid JSON", f"{valid} of {measures.succeeded} answers"))
    for kind, failure in measures.failures.items():
        found.append(("failed", f"{failure.count} x {kind}{': ' if failure.example else ''}{failure.example}"))
    parts = [] if measures.dispatch_lag is None else [f"sent {measures.dispatch_lag.p99 * 1000:.1f} ms late (p99)"]
    if measures.loop_lag is not None:
        parts.append(f"event loop {measures.loop_lag.p99 * 1000:.1f} ms late (p99)")
    found.append(("load generator", ", ".join([*parts, f"{measures.busy:.0%} of a core"])))
    return found + [("WARNING", warning) for warning in measures.warnings]


def sweep_lines(result: Result) -> list[str]:
    """A line for each load, for sweeps."""
    rows = sweep_rows(result)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def sweep_rows(result: Result) -> list[tuple[str, ...]]:
    """A head and a row for each load; times in milliseconds."""
    slo = result.plan.slo is not None
    head = (
        "load",
        "requests/s",
        "output tokens/s",
        "TTFT p50",
        "TTFT p99",
        "inter-token p50",
        "inter-token p99",
        "e2e p50",
        "failed",
    )
    rows: list[tuple[str, ...]] = [(*head, "goodput/s") if slo else head]
    for found in result.levels:
        measures = found.measures
        cells: tuple[str, ...] = (
            str(found.level),
            f"{measures.rate(measures.succeeded):.2f}",
            f"{measures.rate(measures.output_tokens):.1f}",
            *(_milliseconds(measures.ttft, at) for at in ("p50", "p99")),
            *(_milliseconds(measures.itl, at) for at in ("p50", "p99")),
            _milliseconds(measures.e2e, "p50"),
            str(measures.failed),
        )
        rows.append((*cells, f"{measures.rate(measures.good or 0):.2f}") if slo else cells)
    return rows


def columns(spread: Spread) -> tuple[float, ...]:
    """Mean, percentiles and maximum, in seconds."""
    return spread.mean, spread.p50, spread.p90, spread.p99, spread.max


def spread_of(measures: Measures, name: str) -> Spread | None:
    """One of :data:`SPREADS`."""
    return {"ttft": measures.ttft, "itl": measures.itl, "tpot": measures.tpot, "e2e": measures.e2e}[name]


def _milliseconds(spread: Spread | None, at: str) -> str:
    return "-" if spread is None else f"{(spread.p50 if at == 'p50' else spread.p99) * 1000:.1f}"


def to_json(result: Result) -> dict[str, Any]:
    """The whole result; times in seconds, rates a second."""
    plan = result.plan
    return {
        "sapwood": version("sapwood"),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": str(plan.where),
        "api": plan.where.api_used,
        "model": result.model,
        "dataset": "trace" if plan.source.trace else plan.source.dataset,
        "input_tokens": str(plan.source.inputs),
        "output_tokens": str(plan.source.outputs),
        "seed": plan.seed,
        "temperature": plan.sampling.temperature,
        "ignore_eos": plan.sampling.ignore_eos,
        "slo": None if plan.slo is None else dict(plan.slo.limits),
        "tokens_a_word": result.tokens_a_word,
        "interrupted": result.interrupted,
        "levels": [level_json(found) for found in result.levels],
    }


def level_json(found: LevelResult) -> dict[str, Any]:
    """A load's figures; times in seconds."""
    measures = found.measures
    return {
        "load": {found.level.kind: found.level.value},
        **dataclasses.asdict(measures),
        "failed": measures.failed,
        "requests_per_second": measures.rate(measures.succeeded),
        "input_tokens_per_second": measures.rate(measures.input_tokens),
        "output_tokens_per_second": measures.rate(measures.output_tokens),
        "goodput_per_second": None if measures.good is None else measures.rate(measures.good),
    }


def record_json(found: LevelResult, record: Record) -> dict[str, Any]:
    """One request; times in seconds after the load's start."""
    began = found.run.began
    return {
        "load": {found.level.kind: found.level.value},
        "due": record.due - began,
        "sent": record.sent - began if record.sent else None,
        "arrivals": [at - began for at in record.arrivals],
        "ended": record.ended - began if record.ended else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "message": record.message,
    }
