"""Objectives: how soon a request's first token is to come, and how long each further one may take.

A client names them by the headers (or metadata) that llm-d's router has, in milliseconds: ``x-slo-ttft-ms``, ``x-slo-tpot-ms``. A
tenant's rule says from where to where its requests may go, and what holds for those that name nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sapwood_common.contract.limits import LONGEST_TARGET_MS
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError
from sapwood_common.tenants.tenant import TargetRange, TenantSettings

FIRST_TOKEN_KEY, EACH_TOKEN_KEY = "x-slo-ttft-ms", "x-slo-tpot-ms"
STATUS_KEY = "x-sapwood-objective"
"""Says what became of a request: ``met``, ``missed`` or ``shed`` if it has an objective; ``held`` or ``preempted`` if it made way
for one that has."""
MET, MISSED, SHED, HELD, PREEMPTED = "met", "missed", "shed", "held", "preempted"
OUTCOMES = (MET, MISSED, SHED)
WAYS = (HELD, PREEMPTED)

_NUMBER = re.compile(r"[0-9]{1,8}(\.[0-9]{1,3})?")


class ShedError(ResourceExhaustedError):
    """A request whose objective cannot be met is refused at once."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A request's targets in seconds; 0: there is none.

    Attributes:
        first_token: From the request to its first token.
        each_token: The mean of each further token.
    """

    first_token: float = 0.0
    each_token: float = 0.0


def worst(outcomes: Iterable[str]) -> str:
    """What an answer tells of objectives, by what its generations do; empty: nothing."""
    said = set(outcomes)
    return next((each for each in (MISSED, MET, PREEMPTED, HELD) if each in said), "")


def objective_of(
    get: Callable[[str], str | None], settings: TenantSettings | None, *, usual: bool = True
) -> Objective | None:
    """The objective that metadata or headers name, within the tenant's rule; None: there is none.

    Args:
        get: The value of a key, None if it is not there.
        settings: The tenant's, if keys are asked for.
        usual: Whether the tenant's targets hold where the request names none.

    Raises:
        InvalidArgumentError: A value makes no sense, or is beyond the rule.
    """
    rules = (None, None) if settings is None else (settings.first_token, settings.each_token)
    first, each = (
        _target(get(key), key, rule, usual=usual)
        for key, rule in zip((FIRST_TOKEN_KEY, EACH_TOKEN_KEY), rules, strict=True)
    )
    return Objective(first / 1000, each / 1000) if first or each else None


def _target(value: str | None, key: str, rule: TargetRange | None, *, usual: bool) -> float:
    """A target in milliseconds; 0: there is none."""
    if not value:
        return 0.0 if rule is None or not usual else rule.most
    target = float(value) if _NUMBER.fullmatch(value) else 0.0
    if not 0 < target <= LONGEST_TARGET_MS:
        raise InvalidArgumentError(
            f"{key} must be a number of milliseconds over 0, at most {LONGEST_TARGET_MS}, got {value[:20]!r}", field=key
        )
    if rule is not None and not rule.least <= target <= rule.most:
        allowed = f"{rule.least:g}" if rule.least == rule.most else f"from {rule.least:g} to {rule.most:g}"
        raise InvalidArgumentError(f"{key} may be {allowed} with this API key, got {target:g}", field=key)
    return target
