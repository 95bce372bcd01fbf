"""Uses Triton's attention kernels until FlashInfer's libraries are compiled, so that a cold start need not wait."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionNeeds,
    AttentionParts,
    StepAttention,
)
from sapwood_worker.model.attention.registry import ChosenBackend, refusal
from sapwood_worker.model.attention.triton import TRITON

logger = logging.getLogger(__name__)
_NOW = "triton"


class Compiling(Protocol):
    """Libraries that are being compiled."""

    @property
    def done(self) -> bool:
        """Whether compiling has ended, successfully or not."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why it has failed."""
        ...

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        ...


class MeanwhileAttention:
    """Implements ``StepAttention`` with a ready backend, and with a better one from the first step after that is compiled.

    Args:
        now: Computes at first.
        later: The better backend; it needs the compiled libraries only when it first plans. compiling: The libraries that
        ``later`` waits for. If it fails, ``now`` stays in use.
    """

    def __init__(self, now: StepAttention, later: StepAttention, compiling: Compiling) -> None:
        self._current, self._later = now, later
        self._compiling: Compiling | None = compiling

    def plan(self, batch: AttentionBatch) -> None:
        compiling = self._compiling
        if compiling is not None and compiling.done:
            self._compiling = None
            if compiling.error is None:
                self._current = self._later
                logger.info(
                    "attention: prompts by FlashInfer from now on, after %.0f s of compiling", compiling.seconds
                )
            else:
                logger.warning(
                    "attention: prompts stay with Triton, FlashInfer cannot be compiled: %s", compiling.error
                )
        self._current.plan(batch)

    def attend(self, layer: AttentionLayer, query: Tensor, out: Tensor | None = None) -> Tensor:
        return self._current.attend(layer, query, out)


def meanwhile(
    prefill: ChosenBackend,
    decode: ChosenBackend,
    needs: AttentionNeeds,
    ops: DeviceOps,
    compiling: Compiling,
    now: AttentionBackend = TRITON,
) -> tuple[ChosenBackend, ChosenBackend] | None:
    """Prefill and decode that need not wait for the libraries being compiled; None: this model has no other backend.

    Decodes, which are captured in graphs, stay with ``now``; prompts go to their own backend once it is there.

    Args:
        prefill, decode: The chosen backends. Some backends need the libraries.
        needs: What the model asks.
        ops: The device's operations.
        compiling: The libraries.
        now: The backend until then.
    """
    if refusal(now, "prefill", needs, ops) or refusal(now, "decode", needs, ops):
        return None
    first, then = now.prefill, prefill.backend.prefill
    assert first is not None and then is not None

    def make(parts: AttentionParts) -> StepAttention:
        return MeanwhileAttention(first(parts), then(parts), compiling)

    if prefill.name == "flashinfer":
        reason = f"{prefill.reason}; by {_NOW} until its libraries are compiled, which goes on"
        prefill = ChosenBackend(prefill.name, replace(prefill.backend, prefill=make), reason)
    if decode.name == "flashinfer":
        decode = ChosenBackend(_NOW, now, "flashinfer's libraries are not compiled yet")
    return prefill, decode
