"""A benchmark's result as one HTML file that needs nothing next to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from sapwood.bench.benchmark import Result
from sapwood.bench.plots import to_svg
from sapwood.bench.report import SPREADS, columns, facts, spread_of, sweep_rows, to_json

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2b25; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p.where { color: #5b6b64; margin-top: 0; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 0.5rem 0; }
th, td { padding: 0.25rem 0.8rem; text-align: right; border-bottom: 1px solid #dde5e1; }
th:first-child, td:first-child { text-align: left; } td { font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; } dt { color: #5b6b64; } dd { margin: 0; }
dt.WARNING, dt.failed, dt.WARNING + dd, dt.failed + dd { color: #a3341c; font-weight: 600; }
pre { background: #f3f6f4; padding: 0.8rem; overflow: auto; max-height: 30rem; font-size: 12px; }
"""


def write_page(result: Result, path: Path) -> None:
    """Writes the file. Raises OSError."""
    path.write_text(render(result, to_svg(result) if result.levels else ""), encoding="utf-8")


def render(result: Result, svg: str) -> str:
    """The page, with the picture."""
    figures = to_json(result)
    title = f"{result.model}: benchmark"
    where = f"{figures['target']}, {figures['api']}, {figures['dataset']}, seed {figures['seed']}, {figures['written']}"
    parts = [
        f"<h1>{escape(title)}</h1><p class=where>{escape(where)}</p>",
        "<p>Interrupted before its end.</p>" if result.interrupted else "",
    ]
    if len(result.levels) > 1:
        head, *rows = sweep_rows(result)
        parts.append(f"<h2>By load (times in ms)</h2>{_table(head, rows)}")
    parts.append(svg)
    for found in result.levels:
        spreads = ((title, spread_of(found.measures, name)) for name, title in SPREADS.items())
        rows = [
            (title, *(f"{value * 1000:.1f}" for value in columns(spread)))
            for title, spread in spreads
            if spread is not None
        ]
        terms = "".join(
            f"<dt class={escape(title.partition(' ')[0])}>{escape(title)}</dt><dd>{escape(text)}</dd>"
            for title, text in facts(found.measures, result.plan.slo)
        )
        head = ("ms", "mean", "p50", "p90", "p99", "max")
        requests = f"{found.measures.requests} requests in {found.measures.seconds:.1f} s"
        parts.append(f"<h2>{escape(str(found.level))}: {requests}</h2>{_table(head, rows)}<dl>{terms}</dl>")
    parts.append(
        f"<details><summary>All figures as JSON</summary><pre>{escape(json.dumps(figures, indent=1))}</pre></details>"
    )
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
