"""Calls of UpdateWeights as trainers make them, in buckets and pieces of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from sapwood.v1 import worker_pb2
from sapwood.weights import update_messages


def streamed(
    tensors: Mapping[str, Tensor], *, buckets: int = 1, piece: int = 1 << 16, **options: Any
) -> Iterator[worker_pb2.UpdateWeightsRequest]:
    """The messages of an update whose tensors travel in it.

    Args:
        tensors: By name.
        buckets: In about how many parts they are described.
        piece: The most bytes of a message.
        options: Further fields of the first message.
    """
    size = sum(each.nbytes for each in tensors.values())
    return update_messages(tensors, bucket_bytes=-(-size // buckets), piece_bytes=piece, **options)
