"""How steps that are in flight at once share the running requests."""

from __future__ import annotations

from sapwood_worker.core.scheduler.request import Request


class Lanes:
    """Lanes of a pipeline: each step decodes a share of the requests while other stages compute the steps before it.

    Args:
        count: Steps that are in flight at once, of other requests each; 1: one, or two with the same requests.
        fewest: Requests from which on they are shared; fewer are all in each step.
        chained: Whether the device keeps the tokens that it samples. Then one more step may be in flight, with the requests of
            the oldest, so that no stage waits for the host.

    Attributes:
        count: The argument.
        depth: The most steps that are ever in flight, where there are lanes; :meth:`most_in_flight` may say fewer.
    """

    def __init__(self, count: int, fewest: int = 1, *, chained: bool = False) -> None:
        self.count = count
        self.depth = count + chained if count > 1 else 1
        self._fewest, self._chained = fewest, chained

    def shares(self, requests: int) -> int:
        """Into how many shares so many running requests go."""
        if not self._chained or self.count == 1:
            return self.count
        return max(1, min(self.count, requests)) if requests >= self._fewest else 1

    def most_in_flight(self, requests: int, *, prompts: bool) -> int:
        """How many steps may be in flight, where there are lanes.

        Decodes: one for each share, and one more where the device keeps its tokens. More would not help: a request can be in two
        steps in flight only, so with three those that began in different steps would each miss every third.

        Args:
            requests: How many run.
            prompts: Whether a step in flight computes any: theirs keep all stages busy.
        """
        return self.depth if prompts else min(self.depth, self.shares(requests) + self._chained)

    def holds_back(self, request: Request, step: int, shares: int) -> bool:
        """Whether a request of which steps in flight sample a token is in none that is planned now.

        Args:
            request: The request.
            step: The number of the step being planned.
            shares: Of how many shares the requests are.
        """
        if self.count == 1 or not request.unknown:
            return False
        if not self._chained or request.unknown > 1 or request.grammar is not None or request.processed:
            return True
        return request.sampled_in > step - shares
