"""A step that was queued on the device, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.sampling.logprobs import Logprobs
from sapwood_worker.model.sampling.token_sampler import SampledTokens
from sapwood_worker.records.output import TokenLogprobs
from sapwood_worker.records.page_copies import CopyReport
from sapwood_worker.records.step import ModelOutput, SchedulerOutput


class LaunchedStep:
    """Implements :class:`sapwood_worker.records.step.LaunchedStep`; copies results to the host from construction on.

    Args:
        output: The step.
        sampled: Indices of the requests that sample.
        tokens: The sampled tokens; None if no request samples.
        prompts: Log probabilities of prompt tokens, by the request's index.
        pooled: float32 [hidden_size] of each chunk that is to be pooled, by the request's index.
        copied: Asked, when the result is taken, which copies between tiers have ended.
        ops: The operations of the results' device.
    """

    def __init__(
        self,
        output: SchedulerOutput,
        sampled: Sequence[int],
        tokens: SampledTokens | None,
        prompts: Mapping[int, Logprobs],
        copied: Callable[[], CopyReport],
        ops: DeviceOps,
        pooled: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._step = output.step
        self._count = len(output.requests)
        self._sampled = sampled
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
        self._copies = ops.to_host(tensors)

    def result(self) -> ModelOutput:
        """May be called once."""
        tensors = iter(self._copies.wait())
        token_ids = [-1] * self._count
        logprobs: dict[int, TokenLogprobs] = {}
        if self._tokens is not None:
            values: list[int] = next(tensors).tolist()
            for index, token in zip(self._sampled, values, strict=True):
                token_ids[index] = token
            if self._tokens.logprobs is not None:
                found = Logprobs(next(tensors), next(tensors), next(tensors)).to_list(self._tokens.alternatives)
                for row, each in zip(self._tokens.rows, found, strict=True):
                    if values[row] >= 0:
                        logprobs[self._sampled[row]] = each
        prompts = {index: Logprobs(next(tensors), next(tensors), next(tensors)).to_list() for index in self._prompts}
        pooled = {index: next(tensors).numpy() for index in self._pooled}
        return ModelOutput(self._step, token_ids, self._copied(), logprobs, prompts, pooled)
