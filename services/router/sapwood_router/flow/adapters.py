"""The adapters (LoRA) as clients and operators see them: listed, loaded and unloaded."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_common.telemetry.shown_text import without_credentials
from sapwood_router.fleet.lora_control import LoraControl
from sapwood_router.fleet.loras import FleetLora, FleetLoras


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter at one moment; fields as in ``FleetLora`` of ``router.proto``. Its path has no credentials."""

    name: str
    model: str
    path: str
    version: int
    digest: bytes
    workers: tuple[str, ...]
    chosen: tuple[str, ...]
    in_flight: int
    requests_per_minute: float


def adapter_states(loras: FleetLoras) -> list[AdapterState]:
    """All adapters, by model and name."""
    return [_state(each, loras) for each in loras.all()]


class Adapters:
    """Loads and unloads.

    Args:
        loras: What there is.
        control: Has workers load and unload.
    """

    def __init__(self, loras: FleetLoras, control: LoraControl) -> None:
        self._loras = loras
        self._control = control

    def list(self) -> list[AdapterState]:
        """All adapters, by model and name."""
        return adapter_states(self._loras)

    async def load(self, name: str, path: str, model: str | None, *, pinned: bool = False) -> AdapterState:
        """Loads an adapter. Takes and raises what :meth:`LoraControl.load` does."""
        return _state(await self._control.load(name, path, model, pinned=pinned), self._loras)

    async def unload(self, name: str, *, abort: bool = False) -> int:
        """Unloads an adapter. Takes, returns and raises what :meth:`LoraControl.unload` does."""
        return await self._control.unload(name, abort=abort)


def _state(lora: FleetLora, loras: FleetLoras) -> AdapterState:
    return AdapterState(
        name=lora.name,
        model=lora.model,
        path=without_credentials(lora.path),
        version=lora.version,
        digest=lora.digest,
        workers=tuple(sorted(lora.workers)),
        chosen=tuple(loras.places(lora.model, lora.name)),
        in_flight=loras.in_flight(lora.model, lora.name),
        requests_per_minute=loras.per_minute(lora.model, lora.name),
    )
