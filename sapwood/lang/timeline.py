"""A run as a picture: one row a state, one bar a node, in one HTML file that loads nothing.

A bar's length is its time, its colours are what the server computed of the prompt, found in its cache, and generated.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sapwood.lang.interpreter import Event, Record

_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:24px;color:#1b1f24;background:#fff}
h1{font-size:18px;margin:0 0 4px}p{margin:0 0 12px;color:#57606a}
.lane{display:flex;align-items:center;margin:2px 0}.name{flex:0 0 90px;color:#57606a}
.track{position:relative;flex:1;height:24px;background:#f3f4f6;border-radius:3px}
.bar{position:absolute;top:2px;height:20px;min-width:2px;display:flex;border-radius:2px;overflow:hidden;background:#d0d7de}
.bar i{display:block;height:100%}.cached,.k1{background:#9ec5e8}.computed,.k2{background:#e8a33d}.made,.k3{background:#4a9d5b}
.failed{outline:2px solid #cf222e}
.key span{display:inline-block;width:12px;height:12px;margin:0 4px 0 12px;vertical-align:-1px}
table{border-collapse:collapse;margin-top:16px;width:100%}
td,th{padding:3px 10px 3px 0;text-align:left;border-bottom:1px solid #eaeef2}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}td.t{font-family:ui-monospace,monospace;white-space:pre-wrap}
"""


class Timeline:
    """What a run did and when.

    Args:
        record: The run's.
        title: The picture's headline.
    """

    def __init__(self, record: Record, title: str = "A program's run") -> None:
        self._record = record
        self._title = title

    @property
    def events(self) -> list[Event]:
        """The nodes that were done, by the time at which they began."""
        return sorted(self._record.events, key=lambda event: (event.begin, event.state))

    @property
    def requests(self) -> int:
        """Requests that the backend made."""
        return sum(event.usage.requests for event in self._record.events)

    def html(self) -> str:
        """The picture."""
        events = self.events
        whole = max((event.end for event in events), default=0.0) or 1.0
        lanes = sorted({0, *self._record.parents, *(event.state for event in events)})
        cached = sum(event.usage.cached_tokens for event in events)
        prompt = sum(event.usage.prompt_tokens for event in events)
        made = sum(event.usage.completion_tokens for event in events)
        head = (
            f"{len(lanes)} states, {len(events)} nodes, {self.requests} requests, {whole:.3f} s; "
            f"{prompt} prompt tokens, {cached} of them cached; {made} generated"
        )
        rows = "".join(self._lane(number, [e for e in events if e.state == number], whole) for number in lanes)
        listed = "".join(map(_row, events))
        columns = "".join(
            f'<th class="{kind}">{name}</th>'
            for name, kind in (("state", "n"), ("node", ""), ("line", ""), ("from", "n"), ("seconds", "n"),
                               ("prompt", "n"), ("cached", "n"), ("generated", "n"), ("text", ""))
        )  # fmt: skip
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self._title)}</title>'
            f"<style>{_STYLE}</style><h1>{html.escape(self._title)}</h1><p>{head}</p>"
            '<p class="key">prompt:<span class="k1"></span>cached<span class="k2"></span>computed'
            '<span class="k3"></span>generated</p>'
            f"{rows}<table><tr>{columns}</tr>{listed}</table></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Writes the picture to a file. Raises OSError."""
        target = Path(path)
        target.write_text(self.html(), encoding="utf-8")
        return target

    def _lane(self, number: int, events: list[Event], whole: float) -> str:
        parent = self._record.parents.get(number)
        name = "state 0" if parent is None else f"{number} (of {parent})"
        bars = "".join(_bar(event, whole) for event in events)
        return f'<div class="lane"><div class="name">{name}</div><div class="track">{bars}</div></div>'


def _bar(event: Event, whole: float) -> str:
    usage = event.usage
    computed = max(0, usage.prompt_tokens - usage.cached_tokens)
    parts = "".join(
        f'<i class="{kind}" style="flex:{count}"></i>'
        for kind, count in (("cached", usage.cached_tokens), ("computed", computed), ("made", usage.completion_tokens))
        if count
    )
    title = (
        f"{event.node}\n{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, "
        f"{usage.completion_tokens} generated\n{event.error or event.text[:200]}"
    )
    failed = " failed" if event.error else ""
    left, width = 100 * event.begin / whole, 100 * (event.end - event.begin) / whole
    place = f"left:{left:.3f}%;width:{width:.3f}%"
    return f'<div class="bar{failed}" style="{place}" title="{html.escape(title, quote=True)}">{parts}</div>'


def _row(event: Event) -> str:
    usage = event.usage
    numbers = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    cells = [
        f'<td class="n">{event.state}</td><td>{html.escape(event.node)}</td><td>{html.escape(Path(event.line).name)}</td>',
        f'<td class="n">{event.begin:.3f}</td><td class="n">{event.end - event.begin:.3f}</td>',
        *(f'<td class="n">{number if usage.requests else ""}</td>' for number in numbers),
        f'<td class="t">{html.escape(event.error or event.text[:300])}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"
