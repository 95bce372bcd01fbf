"""`sapwood bench compare`: two results of `sapwood bench --json`, figure by figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sapwood.cli.errors import EXIT_CODES, REFUSED, CliError
from sapwood.cli.terminal import one_line
from sapwood.cli.top import table

_RATES = (
    ("requests/s", "requests_per_second"),
    ("input tokens/s", "input_tokens_per_second"),
    ("output tokens/s", "output_tokens_per_second"),
    ("goodput/s", "goodput_per_second"),
)
_SPREADS = (("TTFT", "ttft"), ("inter-token", "itl"), ("per output token", "tpot"), ("end-to-end", "e2e"))
_SAME = ("model", "dataset", "input_tokens", "output_tokens", "seed", "temperature", "api")
"""What two results have to share for their difference to be the server's."""
_NEUTRAL = ("requests", "prompts cached, %")
"""Figures that say what was measured, not how well."""
_CACHED_ALIKE = 0.1
"""Shares of cached prompts that differ by no more than this."""
_NOTABLE = 0.03
"""A change of less is called neither better nor worse."""


def configure(actions: Any) -> None:
    """Adds the verb to those of `sapwood bench`."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "compare",
        help="two results of --json, figure by figure",
        description="Prints two results of `sapwood bench --json`, load by load, and how much the second differs from the first.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("first", metavar="BEFORE", type=Path, help="A file that --json wrote.")
    parser.add_argument("second", metavar="AFTER", type=Path, help="Another.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns the exit code, raises CliError."""
    print("\n".join(lines(_read(arguments.first), _read(arguments.second))))
    return 0


def lines(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """What is printed of two results. Raises CliError: they have no load in common."""
    shown = [
        f"WARNING {name} differs: {one_line(first.get(name))} and {one_line(second.get(name))}"
        for name in _SAME
        if first.get(name) != second.get(name)
    ]
    loads = {json.dumps(level["load"], sort_keys=True): level for level in second["levels"]}
    pairs = [(each, loads.get(json.dumps(each["load"], sort_keys=True))) for each in first["levels"]]
    common = [(before, after) for before, after in pairs if after is not None]
    if not common:
        has = [", ".join(map(_load, each["levels"])) or "none" for each in (first, second)]
        raise CliError(
            f"no load is in both: BEFORE has {has[0]}, AFTER {has[1]}; measure the same --concurrency or --rate",
            REFUSED,
        )
    for before, after in common:
        rows = [("", "before", "after", "difference", ""), *_rows(before, after)]
        shown += [_load(before), *(f"  {line}" for line in table(rows))]
        one, other = _cached(before), _cached(after)
        if one is not None and other is not None and abs(one - other) > _CACHED_ALIKE:
            shown.append(
                f"  WARNING the server had {one:.0%} and {other:.0%} of the prompts in its cache: empty it before each run, "
                "for Sapwood with `sapwood cache clear`"
            )
    both = [_load(before) for before, _ in common]
    left = [_load(each) for each in (*first["levels"], *second["levels"]) if _load(each) not in both]
    return shown + ([f"in one of them only: {', '.join(left)}"] if left else [])


def _load(level: dict[str, Any]) -> str:
    return ", ".join(f"{one_line(kind)} {value:g}" for kind, value in level["load"].items())


def _cached(level: dict[str, Any]) -> float | None:
    """The share of the prompts' tokens that came from a cache; None: the server did not say."""
    tokens, cached = level.get("input_tokens"), level.get("cached_tokens")
    return None if not tokens or cached is None else cached / tokens


def _rows(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, ...]]:
    figures: list[tuple[str, float | None, float | None, int]] = [
        ("requests", before.get("requests"), after.get("requests"), 1),
        ("prompts cached, %", _cached(before), _cached(after), 100),
    ]
    figures += [(title, before.get(name), after.get(name), 1) for title, name in _RATES]
    for title, name in _SPREADS:
        for at in ("p50", "p99"):
            values = [(level.get(name) or {}).get(at) for level in (before, after)]
            figures.append((f"{title} {at}, ms", values[0], values[1], 1000))
    figures.append(("failed", before.get("failed"), after.get("failed"), 1))
    return [
        (title, _amount(one, scale), _amount(other, scale), *_change(title, one, other))
        for title, one, other, scale in figures
        if one is not None or other is not None
    ]


def _change(title: str, one: float | None, other: float | None) -> tuple[str, str]:
    """By how much a figure differs, and whether that is better: rates should be high, times and failures low."""
    if one is None or other is None or title in _NEUTRAL:
        return "-", ""
    better = "better" if (other > one) == title.endswith("/s") else "worse"
    if not one:
        return "-", better if other else ""
    change = (other - one) / one
    return f"{change:+.1%}", better if abs(change) >= _NOTABLE else ""


def _amount(value: float | None, scale: int) -> str:
    return "-" if value is None else f"{value * scale:.4g}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        levels = found["levels"]
        whole = all(
            isinstance(level["load"], dict) and all(isinstance(v, int | float) for v in level["load"].values())
            for level in levels
        )
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}", REFUSED) from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CliError(f"{path} is no result of `sapwood bench --json`", REFUSED)
    return dict(found)
