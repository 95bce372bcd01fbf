"""Drafts of text that a grammar forces, such as the keys of a JSON schema.

A token of such a draft differs from the output only where the model would cut the same text into other tokens, so these drafts
need no search, no trial and no measured costs. Each request has a rate, how often the tokens were right of late, which says how
far ahead to draft: as long as a token's chance to be used is at least ``_LEAST_WORTH``, and never less than one token.
O(requests + drafted tokens) a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sapwood_worker.core.scheduler.batch import StepInFlight
from sapwood_worker.core.scheduler.request import Request, learned
from sapwood_worker.core.scheduler.speculation.speculation import MOST_DRAFTED
from sapwood_worker.records.step import ModelOutput

_WEIGHT = 0.1
"""How much one token changes a request's rate."""
_LEAST_WORTH = 0.3
"""The least chance that a drafted token is used."""


class ForcedDrafts:
    """Plans the drafts of forced text.

    Args:
        most_positions: Most sampled positions of a step.
        room: Gives a request pages for a number of tokens after its next one; returns for how many it has pages.

    Attributes:
        accepted_tokens: How many drafted tokens became output.
    """

    def __init__(self, most_positions: int, room: Callable[[Request, int], int]) -> None:
        self._most_positions = most_positions
        self._room = room
        self.accepted_tokens = 0

    def plan(self, decodes: Sequence[Request]) -> list[list[int]]:
        """The draft of each of these decoding requests; empty if no request has one."""
        left = self._most_positions - len(decodes)
        drafts: list[list[int]] = []
        for request in decodes:
            drafts.append(draft := self._draft(request, left) if request.grammar is not None and left > 0 else [])
            left -= len(draft)
        return drafts if any(drafts) else []

    def took(self, step: StepInFlight, output: ModelOutput) -> None:
        """Learns how many tokens of each draft in a step were right."""
        for request, draft, tokens in zip(step.decodes, step.drafts, output.token_ids, strict=False):
            if draft:
                right = len(tokens) - 1
                request.forced_rate = learned(request.forced_rate, right, int(right < len(draft)), _WEIGHT)
                self.accepted_tokens += 0 if request.over else right

    def _draft(self, request: Request, left: int) -> list[int]:
        grammar, rate = request.grammar, request.forced_rate
        if grammar is None or not rate or request.unknown:
            return []
        ahead = MOST_DRAFTED if rate > 1 - 1e-3 else max(1, int(math.log(_LEAST_WORTH) / math.log(rate)))
        most = min(left, ahead, MOST_DRAFTED, request.max_length - len(request.token_ids) - 1)
        if most <= 0 or not (draft := grammar.guess(most, request.token_ids, request.output_start)):
            return []
        draft = draft[: grammar.validate(draft)]
        stop = next((place for place, token in enumerate(draft, 1) if token in request.stops), len(draft))
        return draft[: self._room(request, stop)] if draft else []
