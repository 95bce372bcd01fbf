"""Expressions for the formats of dates and times, stricter than the engine's own, which admits leap seconds and February 29ths
that never were, and the year 0 (RFC 3339; Gregorian calendar)."""

from __future__ import annotations

_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_YEAR = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](|\.[0-9]{{1,9}})(Z|[+-]{_CLOCK})"

PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""A regular expression for the whole text of each format."""
