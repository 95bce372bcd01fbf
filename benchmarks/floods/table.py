"""The table of docs/design/figures-floods.md: a row a flood, our router and grpcio's server next to each other."""

from __future__ import annotations

from floods.attacker import Fate
from floods.outcome import Outcome
from floods.tables import FLOODS
from floods.targets import GRPCIO, OURS

_PLACES = ((1, False), (10, False), (1, True), (10, True))
"""Connections of the attacker, and whether over TLS."""


def render(outcomes: list[Outcome]) -> str:
    """The table in Markdown, and how many cases met the goal. Milliseconds, and MB above the calm."""
    by_place = {(each.flood, each.server, each.connections, each.tls): each for each in outcomes}
    names = [flood.name for flood in FLOODS if any(each.flood == flood.name for each in outcomes)]
    places = {
        server: [
            place
            for place in _PLACES
            if any((each.connections, each.tls) == place for each in outcomes if each.server == server)
        ]
        for server in (OURS, GRPCIO)
    }
    heads = [_place_name(*place) for place in places[OURS]] + ["the attacker"]
    heads += [f"grpcio: {_place_name(*place)}" for place in places[GRPCIO]]
    lines = [f"| flood | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in names:
        ours = [by_place.get((name, OURS, *place)) for place in places[OURS]]
        peers = [by_place.get((name, GRPCIO, *place)) for place in places[GRPCIO]]
        fates = [each.fate for each in ours if each is not None]
        lines.append(f"| {' | '.join([name, *map(_cell, ours), _fate(fates), *map(_cell, peers)])} |")
    for server in (OURS, GRPCIO):
        those = [each for each in outcomes if each.server == server]
        if those:
            lines.append(f"\n{server}: {sum(each.met for each in those)} of {len(those)} met the goal.")
    return "\n".join(lines)


def _place_name(connections: int, tls: bool) -> str:
    return f"{connections}{', TLS' if tls else ''}"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    kind, _ = outcome.worst
    text = f"{1000 * outcome.calm[kind]:.0f} → {1000 * outcome.flooded[kind]:.0f}, {max(0.0, outcome.grown):.0f}"
    if outcome.failed:
        text += f", {sum(outcome.failed.values())} failed"
    return text if outcome.met else f"**{text}**"


def _fate(fates: list[Fate]) -> str:
    """What was said most often as connections were closed, or that the attacker was slowed down."""
    said: dict[str, int] = {}
    for fate in fates:
        for rule, count in fate.rules.items():
            said[rule] = said.get(rule, 0) + count
    rules = {rule: count for rule, count in said.items() if rule != "closed"} or said
    if not rules:
        return f"{max((fate.sent / fate.seconds for fate in fates), default=0) / 1e6:.1f} MB/s taken"
    return max(rules.items(), key=lambda item: item[1])[0].removeprefix("11 ").strip()
