"""Updates of a model's weights as the scheduler and the runner name them."""

from __future__ import annotations

from typing import Literal

import msgspec

InFlight = Literal["retract", "keep", "abort"]
"""What becomes of requests that run when the weights change. ``retract``: their keys and values are computed again with the new
weights. ``keep``: they go on with the old ones. ``abort``: they end with what there is of their output."""

_Digest = bytes
"""Another name, since msgspec takes ``bytes`` in :class:`WeightsFacts` for its field."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor by its name in checkpoints, its dtype by torch's name, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TrainerGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of torch.distributed to join.

    Attributes:
        name: What it is called.
        address, port: Where rank 0, the trainer, has its store.
        world_size: Its ranks.
        rank_offset: The rank in it of the worker's first rank.
        backend: By which tensors travel: ``gloo``, ``nccl``.
    """

    name: str
    address: str
    port: int
    world_size: int
    rank_offset: int
    backend: str


class WeightBucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors to stage for an update.

    Attributes:
        update: The update's number, which counts up from 1 and is never used again.
        number: The bucket's, likewise.
        path: A safetensors file, or a folder of such files; empty: they come from a group.
        checksums: By the tensors' names as they are stored, xxh3-128 of their bytes; tensors that it leaves out are not checked.
        group: The group whose rank 0 broadcasts them.
        tensors: What it broadcasts, in this order.
    """

    update: int
    number: int
    path: str
    checksums: dict[str, bytes] = {}
    group: str = ""
    tensors: tuple[TensorSpec, ...] = ()


class WeightsFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is staged.

    Attributes:
        digest: 16 bytes that stand for all weights as they will be, once it is complete; empty before.
        tensors: How many tensors are staged.
        bytes: Their bytes on this rank.
    """

    digest: _Digest
    tensors: int
    bytes: int


Memory = Literal["weights", "kv_cache"]
"""What a worker can give back while it sleeps: the weights, and the device's pages of keys and values."""
