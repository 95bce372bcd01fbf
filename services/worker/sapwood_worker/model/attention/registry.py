"""The attention backends by name, and the choice among them; packages add backends as entry points of ``GROUP``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_common.errors import ConfigError
from sapwood_common.plugins import find_part
from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionBackend, AttentionNeeds
from sapwood_worker.model.attention.fixed_order import FIXED_ORDER
from sapwood_worker.model.attention.flashinfer import FLASHINFER
from sapwood_worker.model.attention.torch_native import NATIVE, TORCH
from sapwood_worker.model.attention.triton import TRITON
from sapwood_worker.settings import ATTENTION_BACKENDS as GROUP
from sapwood_worker.settings import Half, attention_of

_BACKENDS = {"flashinfer": FLASHINFER, "triton": TRITON, "native": NATIVE, "torch": TORCH, "fixed_order": FIXED_ORDER}
_FASTEST: dict[Half, tuple[str, ...]] = {
    "prefill": ("flashinfer", "triton", "native", "torch"),
    "decode": ("triton", "flashinfer", "native", "torch"),
}
"""The order in which ``auto`` tries the backends on a GPU. It is the same at a first start, when nothing is compiled yet, and
later."""
_FLAG = "--attention-backend"


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The backend of a half.

    Attributes:
        name: Its name.
        backend: It.
        reason: Why it was taken.
    """

    name: str
    backend: AttentionBackend
    reason: str


def choose_backend(setting: str, half: Half, needs: AttentionNeeds, ops: DeviceOps) -> ChosenBackend:
    """The backend of a half of attention.

    Args:
        setting: As :func:`~sapwood_worker.settings.attention_of` takes it.
        half: Which half.
        needs: What the model asks.
        ops: The device's operations.

    Raises:
        ConfigError: There is no such backend, or it cannot do what the model asks.
    """
    name = attention_of(setting)[half]
    if name == "auto":
        return _first_able(half, needs, ops)
    try:
        backend = find_part(GROUP, name, _BACKENDS)
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {setting}: {error}") from error
    refused_for = refusal(backend, half, needs, ops)
    if refused_for is not None:
        raise ConfigError(f"{_FLAG} {setting}: {name} cannot compute the {half} of this model here: {refused_for}")
    return ChosenBackend(name, backend, "as told")


def _first_able(half: Half, needs: AttentionNeeds, ops: DeviceOps) -> ChosenBackend:
    if ops.device.type != "cuda" or needs.shape.dtype == torch.float32:  # the other backends need a GPU's matrix units
        reason = f"{str(needs.shape.dtype).removeprefix('torch.')} on {ops.device.type}"
        if refusal(NATIVE, half, needs, ops) is None:
            return ChosenBackend("native", NATIVE, reason)
        return ChosenBackend("torch", TORCH, reason)
    refused: list[str] = []
    for name in _FASTEST[half]:
        backend = _BACKENDS[name]
        refused_for = refusal(backend, half, needs, ops)
        if refused_for is None:
            reason = "; ".join(refused) if refused else f"the fastest on {ops.device.type}"
            return ChosenBackend(name, backend, reason)
        refused.append(f"not {name}: {refused_for}")
    raise ConfigError(f"{_FLAG}: no backend computes the {half} of this model: {'; '.join(refused)}")


def refusal(backend: AttentionBackend, half: Half, needs: AttentionNeeds, ops: DeviceOps) -> str | None:
    """Why a backend cannot compute a half of a model's attention on a device; None: it can."""
    if (backend.prefill if half == "prefill" else backend.decode) is None:
        return f"it has no {half}"
    if needs.latent and half not in backend.latent:
        return f"it has no {half} of latent attention (MLA)"
    return backend.abilities.refusal(needs, ops)
