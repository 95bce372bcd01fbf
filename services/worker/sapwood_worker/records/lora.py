"""Adapters (LoRA) as the scheduler and the runner name them."""

from __future__ import annotations

import msgspec

_Digest = bytes
"""Another name, since msgspec takes ``bytes`` in :class:`LoraFacts` for its field."""


class Lora(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that a runner is to read.

    Attributes:
        number: Counts up from 1; a number is never used again, not even for the same folder.
        name: Its name, for error messages.
        path: A folder in PEFT's format, or a ``.gguf`` file.
    """

    number: int
    name: str
    path: str


class LoraFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a runner has read.

    Attributes:
        number: The adapter's.
        digest: A hash of its weights and its configuration, taken of the very bytes that were read.
        rank: The largest rank of its modules.
        modules: Names of the adapted projections, each once for all layers: ``self_attn.q_proj``.
        bytes: Host memory that its weights take, over all ranks.
    """

    number: int
    digest: _Digest
    rank: int
    modules: tuple[str, ...]
    bytes: int


class LoraLoad(msgspec.Struct, frozen=True, array_like=True):
    """Puts an adapter that was read into a slot of the device, before the step that names it is computed.

    No step that is launched with or after it uses what the slot held before.

    Attributes:
        slot: From 0, below ``ModelInfo.lora_slots``.
        number: The adapter's.
    """

    slot: int
    number: int
