"""Service-level objectives: what a request has to keep to count as good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sapwood.bench.targets.record import Record

MEASURES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds, by measure: ``ttft``, ``itl`` (of each gap of the answer), ``tpot`` and ``e2e``."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``ttft=200ms,itl=50ms``. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, limit = part.strip().partition("=")
            if name not in MEASURES:
                raise ValueError(f"{part!r} is not {', '.join(MEASURES)} = a time such as 200ms")
            limits[name] = _seconds(part, limit.strip())
        return cls(limits)

    def is_kept_by(self, record: Record) -> bool:
        """Whether a request succeeded within all limits. A measure that the answer does not have is no fault of its own."""
        if record.error:
            return False
        worst = {"ttft": record.ttft, "itl": max(record.gaps, default=None), "tpot": record.tpot, "e2e": record.e2e}
        return all((worst[name] or 0.0) <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {limit * 1000:g} ms" for name, limit in self.limits.items())


def _seconds(part: str, text: str) -> float:
    for unit, scale in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * scale
            except ValueError:
                break
            if 0 < value < float("inf"):
                return value
    raise ValueError(f"{part!r}: the limit is a time with its unit, such as 200ms or 1.5s")
