"""The picture of a benchmark: none of its texts lies on another, however many loads there were."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from sapwood.bench.plots import _draw


def result_of(levels: list[float], kind: str) -> Any:
    """As much of a result as is drawn."""
    draw = random.Random(1)

    def record() -> Any:
        sent = draw.uniform(1, 50)
        ttft = draw.expovariate(20)
        return SimpleNamespace(
            sent=sent, ended=sent + 2, ttft=ttft, e2e=2.0, gaps=[0.01, 0.02], arrivals=[sent + 1], error=""
        )

    def spread(scale: float) -> Any:
        return SimpleNamespace(p50=scale, p90=2 * scale, p99=400 * scale, mean=scale, max=5000 * scale)

    class Level(SimpleNamespace):
        def __str__(self) -> str:
            return f"{self.kind} {self.value:g} conversations"

    found = [
        SimpleNamespace(
            level=Level(kind=kind, value=value, arriving="conversations"),
            measures=SimpleNamespace(
                ttft=spread(0.01 * value), itl=spread(0.01), output_tokens=1e6 * value, succeeded=value, good=value,
                rate=lambda count: count / 10,
            ),
            run=SimpleNamespace(began=0.0, records=[record() for _ in range(20)]),
        )
        for value in levels
    ]  # fmt: skip
    plan = SimpleNamespace(where="http://a-rather-long-name.example:8000/v1/chat/completions", slo="ttft=1s")
    return SimpleNamespace(model="an/Organisation-with-a-long-name-and-a-model", plan=plan, levels=found)


@pytest.mark.parametrize(
    ("levels", "kind"),
    [
        ([8], "concurrency"),
        ([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], "concurrency"),
        ([1.25, 1.5, 1.75, 2, 100], "rate"),
        ([3, 5], "rate"),
    ],
)
def test_no_text_of_a_picture_lies_on_another_or_is_cut_off(levels: list[float], kind: str) -> None:
    figure = _draw(result_of(levels, kind))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = figure.bbox
    sides = [side for axes in figure.axes for side in (axes.xaxis, axes.yaxis)]
    ticks = {label for side in sides for tick in side.get_major_ticks() for label in (tick.label1, tick.label2)}
    ticks |= {label for side in sides for tick in side.get_minor_ticks() for label in (tick.label1, tick.label2)}
    drawn = {
        label
        for side in sides
        if side.get_visible()
        for tick in side._update_ticks()
        for label in (tick.label1, tick.label2)
    }
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in ticks or text in drawn]  # others are beyond the picture's ends
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    inside = [(name, box) for name, box in boxes if box.width and box.height]
    assert len(inside) > 30
    for name, box in inside:
        assert box.x0 >= whole.x0 - 1, name
        assert box.x1 <= whole.x1 + 1, name
        assert box.y0 >= whole.y0 - 1, name
        assert box.y1 <= whole.y1 + 1, name
    for (one, first), (other, second) in itertools.combinations(inside, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        upright = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert across <= 1 or upright <= 1, (one, other)
