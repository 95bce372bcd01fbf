"""A benchmark's result as a picture. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sapwood.bench.benchmark import LevelResult, Result
from sapwood.bench.measures import Spread, percentile
from sapwood.bench.targets.record import Record

_POINTS = 200
_MOST_DOTS = 2000
_LETTERS_A_LINE = 190
"""Letters in a line of the loads' names."""
_MOST_LINEAR = 8
"""How many times the least load the most one may be before the axis counts doublings."""
_LONGEST_TITLE = 120


def write_png(result: Result, path: Path) -> None:
    """Draws it into a file. Raises OSError."""
    _draw(result).savefig(path, format="png", dpi=110)


def to_svg(result: Result) -> str:
    """Draws it as an SVG element."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sapwood"}):
        _draw(result).savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw(result: Result) -> Any:
    """Up to three rows: figures by load for sweeps, distributions, and what happened over time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9}):
        sweep = len(result.levels) > 1
        rows = 3 if sweep else 2
        longest = max(len(str(found.level)) for found in result.levels)
        in_line = max(1, min(len(result.levels), int(_LETTERS_A_LINE / (longest + 9))))
        names = -(-len(result.levels) // in_line) * 0.22 if sweep else 0.0  # inches that the loads' names take
        height = 3.6 * rows + names
        figure = Figure(figsize=(13, height))
        # By hand: what lays figures out by itself draws them several times.
        figure.subplots_adjust(
            left=0.06, right=0.98, bottom=(0.58 + names) / height, top=1 - 0.8 / height, wspace=0.44, hspace=0.42
        )
        axes = figure.subplots(rows, 3, squeeze=False)
        if sweep:
            _draw_sweep(result, axes[0])
        _draw_distributions(result, axes[-2])
        _draw_time(result, axes[-1])
        figure.suptitle(_cut(f"{result.model} at {result.plan.where}"))
        if sweep:  # one list of names for all: within a picture it would hide what is drawn
            handles, labels = axes[-1][0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="lower center", ncols=in_line, fontsize=8, frameon=False)
    return figure


def _draw_sweep(result: Result, axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    values = [found.level.value for found in result.levels]
    name = {
        "concurrency": "requests at a time",
        "rate": f"{result.levels[0].level.arriving}/s asked for",
        "trace": "speed",
    }[result.levels[0].level.kind]
    rates = [found.measures.rate(found.measures.output_tokens) for found in result.levels]
    axes[0].plot(values, rates, marker="o", label="output tokens/s")
    axes[0].set_title("Throughput")
    axes[0].set_ylabel("output tokens/s")
    axes[0].yaxis.set_major_formatter(EngFormatter(sep=" "))
    others = axes[0].twinx()
    requests = [found.measures.rate(found.measures.succeeded) for found in result.levels]
    others.plot(values, requests, marker="s", linestyle="--", color="tab:orange", label="requests/s")
    others.set_ylabel("requests/s")
    others.set_ylim(bottom=0)
    others.yaxis.set_major_formatter(EngFormatter(sep=" "))
    if result.plan.slo is not None:
        good = [found.measures.rate(found.measures.good or 0) for found in result.levels]
        others.plot(values, good, marker="^", linestyle=":", color="tab:green", label="goodput, requests/s")
    lines = [*axes[0].get_lines(), *others.get_lines()]
    _above(axes[0], lines)
    of: Callable[[LevelResult], Spread | None]
    for axis, title, of in (
        (axes[1], "Time to first token", lambda found: found.measures.ttft),
        (axes[2], "Inter-token latency", lambda found: found.measures.itl),
    ):
        spreads = [(value, spread) for value, found in zip(values, result.levels, strict=True) if (spread := of(found))]
        for label in ("p50", "p90", "p99"):
            heights = [{"p50": s.p50, "p90": s.p90, "p99": s.p99}[label] * 1000 for _, s in spreads]
            axis.plot([value for value, _ in spreads], heights, marker="o", label=label)
        axis.set_title(title)
        axis.set_ylabel("ms")
        _above(axis, axis.get_lines())
    for axis in axes:
        axis.set_xlabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        _mark(axis, values)


def _above(axis: Any, lines: Any) -> None:
    """Names the lines under the title, above all that is drawn."""
    axis.set_title(axis.get_title(), pad=20)
    names = [line.get_label() for line in lines]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.985), "ncols": len(names)}
    axis.legend(lines, names, fontsize=8, frameon=False, columnspacing=1.0, handlelength=1.6, **place)


def _mark(axis: Any, values: list[float]) -> None:
    """Marks the loads that were measured; loads that double are as far from each other as these."""
    least, most = min(values), max(values)
    spread = least > 0 and most / least > _MOST_LINEAR
    if spread:
        axis.set_xscale("log", base=2)
    shown: list[float] = []
    for value in sorted(set(values)):
        far = not shown or (
            value / shown[-1] > (most / least) ** 0.09 if spread else value - shown[-1] > (most - least) * 0.09
        )
        if far:
            shown.append(value)
    axis.set_xticks(shown, [f"{value:g}" for value in shown])
    axis.minorticks_off()


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TITLE else f"{text[:_LONGEST_TITLE]}..."


def _draw_distributions(result: Result, axes: Any) -> None:
    of: Callable[[Record], Iterable[float]]
    for axis, title, of in (
        (axes[0], "Time to first token", lambda record: [] if record.ttft is None else [record.ttft]),
        (axes[1], "Inter-token latency", lambda record: record.gaps),
        (axes[2], "End-to-end", lambda record: [record.e2e]),
    ):
        for found in result.levels:
            ordered = sorted(value for record in _done(found) for value in of(record))
            if ordered:
                shares = [number / _POINTS for number in range(_POINTS + 1)]
                axis.plot([percentile(ordered, share) * 1000 for share in shares], shares, label=str(found.level))
        axis.set_title(f"{title}: share of values below")
        axis.set_xlabel("ms")
        axis.set_ylim(0, 1)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)


def _draw_time(result: Result, axes: Any) -> None:
    for found in result.levels:
        began, label = found.run.began, str(found.level)
        sent = [record for record in found.run.records if record.sent]
        changes = sorted(
            [(record.sent - began, 1) for record in sent] + [(record.ended - began, -1) for record in sent]
        )
        running, times, counts = 0, [0.0], [0]
        for at, change in changes:
            running += change
            times.append(at)
            counts.append(running)
        step = max(1, len(times) // _MOST_DOTS)
        axes[0].step(times[::step], counts[::step], where="post", label=label)
        pieces = [at - began for record in sent for at in record.arrivals]
        if pieces:
            width = max(max(pieces) / 60, 0.05)
            bins = [0] * (int(max(pieces) / width) + 1)
            for at in pieces:
                bins[int(at / width)] += 1
            axes[1].plot(
                [(number + 0.5) * width for number in range(len(bins))], [n / width for n in bins], label=label
            )
        firsts = [(record.sent - began, record.ttft * 1000) for record in _done(found) if record.ttft is not None]
        firsts = firsts[:: max(1, len(firsts) // _MOST_DOTS)]
        axes[2].plot([at for at, _ in firsts], [first for _, first in firsts], ".", markersize=3, label=label)
    for axis, title in zip(
        axes,
        ("Requests under way", "Pieces of answers a second", "Time to first token by time of sending, ms"),
        strict=True,
    ):
        axis.set_title(title)
        axis.set_xlabel("s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)


def _done(found: LevelResult) -> list[Record]:
    return [record for record in found.run.records if record.sent and not record.error]
