"""How many tokens of prompts a step takes, so that it lasts about as long as is wanted: by how long steps took.

A step's time is that of its decodes, and a fixed time for each prompt token. Both are measured while steps run, so a CPU and a
GPU both keep the gap between the tokens of running streams bounded. Prompts get at least twelve times the time that the decodes
take
alone: most of that is what each step costs, so more and shorter steps would compute less. Hence the gap is at most the time
that is wanted, or thirteen times that of a step of decodes, if that is longer.

Where nothing decodes, a step may last longer, as then only requests wait that come meanwhile. O(1).
"""

from __future__ import annotations

_PROMPTS_ALONE = 4
"""How many times as long a step without decodes may last."""
_TIMES = 12
"""Prompts get at least so many times the time of the step's decodes."""
_UNKNOWN = 8
"""While no decode was measured, a step takes at least one part in so many of the most tokens: what each step costs anyway is
unknown, and more steps may be no shorter."""
_LEAST = 16
_WEIGHT, _FULL = 0.3, 32
"""The weight of a new measurement, and the prompt tokens from which on it has that."""
_OUTLIER = 2.0
"""A measurement of more than so many times the usual is the machine's doing."""
_KEPT = 256
"""Steps after which the time of decodes is measured again, by a step with one token of a prompt if there is none without."""


class StepPace:
    """The pace of a scheduler's steps.

    Args:
        seconds: How long a step with decodes is to last; 0: as long as it takes.
        most: Most tokens of a step.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._steps = 0
        # By the power of two of the decodes: seconds, and the step in which they were measured.
        self._plain: dict[int, tuple[float, int]] = {}
        self._each: float | None = None

    def tokens(self, decodes: int) -> int:
        """How many tokens of prompts a step with so many decodes takes at most; at least one."""
        if not self._seconds:
            return self._most
        least = max(_LEAST, self._most // _UNKNOWN)
        if self._each is None:
            return least
        _, measured = self._plain.get(decodes.bit_length(), (0.0, -_KEPT))
        if decodes and self._steps - measured >= _KEPT:
            return 1
        plain = self._usual(decodes)
        wanted = self._seconds if decodes else _PROMPTS_ALONE * self._seconds
        seconds = max(wanted - (plain or 0.0), _TIMES * (plain or 0.0))
        if self._each * self._most <= seconds:
            return self._most
        return max(_LEAST if plain is not None else least, int(seconds / self._each))

    def took(self, decodes: int, prompts: int, seconds: float) -> None:
        """Notes how long a step took that computed so many decodes and tokens of prompts."""
        if not self._seconds or not (decodes or prompts):  # it may only have copied pages
            return
        self._steps += 1
        if prompts <= 1 + decodes // 16 and decodes:
            known = self._plain.get(decodes.bit_length())
            usual = seconds if known is None else _mean(known[0], seconds, _WEIGHT)
            self._plain[decodes.bit_length()] = usual, self._steps
            return
        each = max(0.0, seconds - (self._usual(decodes) or 0.0)) / prompts
        if self._each is None:
            self._each = each
        else:
            self._each = _mean(self._each, each, _WEIGHT * min(1.0, prompts / _FULL))

    def _usual(self, decodes: int) -> float | None:
        """Seconds of a step of about so many decodes alone; None: none was measured. Of no decodes: what a step costs anyway."""
        if not self._plain:
            return None
        bucket = max(1, decodes.bit_length())
        return self._plain[min(self._plain, key=lambda known: (abs(known - bucket), known))][0]


def _mean(known: float, new: float, weight: float) -> float:
    return known + weight * (min(new, _OUTLIER * known) - known) if known else new
