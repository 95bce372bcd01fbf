"""A step that was queued on the device, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.sampling.logprobs import Logprobs
from sapwood_worker.model.sampling.positions import Positions
from sapwood_worker.model.sampling.token_sampler import SampledTokens
from sapwood_worker.records.output import TokenLogprobs
from sapwood_worker.records.page_copies import CopyReport
from sapwood_worker.records.step import LateTokens, ModelOutput, Step, settled


class LaunchedStep:
    """Implements :class:`sapwood_worker.records.step.LaunchedStep`; copies results to the host from construction on.

    Args:
        step: The step.
        at: The positions that it samples.
        tokens: Their tokens; None if there are none.
        prompts: Log probabilities of prompt tokens, by the part's index.
        pooled: float32 [hidden_size] of each chunk that is to be pooled, by the part's index.
        copied: Asked, when the result is taken, which copies between tiers have ended.
        ops: The operations of the results' device.
        spared_tokens: As :class:`ModelOutput` has them.
        seen: int64 [1], as :class:`ModelOutput` has it; None: 0.
    """

    def __init__(
        self,
        step: Step,
        at: Positions | None,
        tokens: SampledTokens | None,
        prompts: Mapping[int, Logprobs],
        copied: Callable[[], CopyReport],
        ops: DeviceOps,
        pooled: Mapping[int, Tensor] | None = None,
        spared_tokens: int = 0,
        seen: Tensor | None = None,
    ) -> None:
        self._spared_tokens = spared_tokens
        self._has_seen = seen is not None
        self._step = step.number
        self._count = len(step.rows)
        self._at = at
        self._late = step.late
        self._tokens = tokens
        self._prompts = prompts
        self._copied = copied
        tensors: list[Tensor] = []
        if tokens is not None:
            tensors = [tokens.tokens, *(tokens.logprobs.tensors if tokens.logprobs is not None else ())]
        for each in prompts.values():
            tensors += each.tensors
        self._pooled = tuple(pooled or ())
        tensors += (pooled or {}).values()
        if seen is not None:
            tensors.append(seen)
        self._copies = ops.to_host(tensors)

    def check(self) -> None:
        self._copies.check()

    def result(self) -> ModelOutput:
        """May be called once."""
        tensors = iter(self._copies.wait())
        token_ids: list[list[int]] = [[] for _ in range(self._count)]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if self._tokens is not None and self._at is not None:
            values: list[int] = next(tensors).tolist()
            parts = _parts(values, self._at, self._late)
            if self._at.drafts is None:
                for part, token in zip(parts, values, strict=True):
                    token_ids[part] = [token]
            else:
                for part, token in zip(parts, values, strict=True):
                    if part >= 0:
                        token_ids[part].append(token)
            if self._tokens.logprobs is not None:
                found = Logprobs(next(tensors), next(tensors), next(tensors)).to_list(self._tokens.alternatives)
                for row, each in zip(self._tokens.rows, found, strict=True):
                    if parts[row] >= 0 and values[row] >= 0:
                        logprobs.setdefault(parts[row], []).append(each)
        prompts = {index: Logprobs(next(tensors), next(tensors), next(tensors)).to_list() for index in self._prompts}
        pooled = {index: next(tensors).numpy() for index in self._pooled}
        failures = {} if self._tokens is None else dict(self._tokens.failures)
        seen = int(next(tensors)) if self._has_seen else 0
        return ModelOutput(
            self._step, token_ids, self._copied(), logprobs, prompts, pooled, failures, self._spared_tokens, seen
        )


def _parts(values: list[int], at: Positions, late: LateTokens | None) -> Sequence[int]:
    """The part of each position; -1 for those after the first of their part whose token is not the draft's."""
    drafts = at.drafts
    if drafts is None:
        return at.parts
    drafted = drafts.tokens if late is None else settled(drafts.tokens, late)
    parts: list[int] = []
    counts = True
    rows = zip(values, drafts.owner.tolist(), drafts.offsets.tolist(), drafted.tolist(), strict=True)
    for token, owner, offset, guess in rows:
        counts = counts or offset == 0
        parts.append(at.parts[owner] if counts else -1)
        counts = counts and token == guess
    return parts
