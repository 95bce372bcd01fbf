"""What ``rope_parameters`` of ``config.json``, or ``rope_scaling`` of older files, says of rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sapwood_worker.model.families.settings import Settings
from sapwood_worker.model.layers.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    yarn_magnitude,
)
from sapwood_worker.model.layers.rotary import RopeConfig


def read_rope(
    given: Mapping[str, Any] | None,
    theta: float,
    values: Mapping[str, Any],
    head_dim: int,
    *,
    interleaved: bool = False,
) -> RopeConfig:
    """A rotary embedding.

    Args:
        given: The settings of it; None: there are none.
        theta: The base if ``given`` has none.
        values: The model's settings.
        head_dim: Elements of a head.
        interleaved: Whether the family turns neighbours together.

    Raises:
        KeyError: A setting is missing.
        ValueError: One is not supported; names it.
    """
    given = given or {}
    if isinstance(given, Settings):  # three positions of a token, which are the same in text
        given.idle("mrope_section", "mrope_interleaved")
    part = float(given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)))
    rotated = int(head_dim * part)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ValueError(f"partial_rotary_factor {part} of heads of {head_dim} elements is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) not in (kind, "mrope"):
        raise ValueError(f"rope_scaling says both rope_type {kind!r} and type {given['type']!r}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"rope_scaling: rotary embedding type {kind!r} is not supported ({', '.join(_KINDS)} are)")
    return RopeConfig(
        float(given.get("rope_theta", theta)),
        _KINDS[kind](given, values, rotated // 2),
        rotated=None if rotated == head_dim else rotated,
        interleaved=interleaved,
    )


def longest_position(values: Mapping[str, Any]) -> int:
    """The longest context: ``max_position_embeddings``, or what yarn makes of a file that gives the length before scaling."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    longest = int(values["max_position_embeddings"])
    if given.get("rope_type", given.get("type")) != "yarn" or given.get("factor") is None:
        return longest
    return max(longest, int(_original(given, values) * float(given["factor"])))


def _original(given: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """The context length before scaling."""
    name = "original_max_position_embeddings"
    return int(given.get(name) or values.get(name) or values["max_position_embeddings"])


def _default(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> None:
    return None


def _linear(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    return LinearScaling(float(given["factor"]))


def _llama3(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    factor, low, high = (float(given[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3Scaling(factor, low, high, _original(given, values))


def _yarn(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    original = _original(given, values)
    factor = float(given.get("factor") or int(values["max_position_embeddings"]) / original)
    magnitude, scale, whole = (given.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
        if scale and whole:
            magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, whole)
    fast, slow = float(given.get("beta_fast") or 32), float(given.get("beta_slow") or 1)
    return YarnScaling(factor, original, fast, slow, float(magnitude), bool(given.get("truncate", True)))


def _longrope(given: Mapping[str, Any], values: Mapping[str, Any], pairs: int) -> RopeScaling:
    original = _original(given, values)
    short, long = (tuple(map(float, given[name])) for name in ("short_factor", "long_factor"))
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if len(divisors) != pairs:
            raise ValueError(f"rope_scaling.{name} has {len(divisors)} numbers for {pairs} pairs of a head")
    factor, magnitude = given.get("factor"), given.get("attention_factor")
    if factor is None:
        factor = int(values["max_position_embeddings"]) / original
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(short, long, original, float(magnitude))


_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], RopeScaling | None]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first files of Phi-3
}
