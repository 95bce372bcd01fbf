"""Tensors as the messages of a worker's UpdateWeights: what a trainer in torch sends after each step.

```py
stub = worker_pb2_grpc.WorkerStub(grpc.insecure_channel("localhost:50061"))
answer = stub.UpdateWeights(update_messages(model.state_dict(), weight_version="12"))
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sapwood.v1 import worker_pb2

if TYPE_CHECKING:
    from torch import Tensor

_BUCKET_BYTES = 256 << 20
_PIECE_BYTES = 2 << 20


def update_messages(
    tensors: Mapping[str, Tensor],
    *,
    bucket_bytes: int = _BUCKET_BYTES,
    piece_bytes: int = _PIECE_BYTES,
    **options: Any,
) -> Iterator[worker_pb2.UpdateWeightsRequest]:
    """The messages of an update, with a checksum for each tensor; a bucket of tensors is in memory at a time.

    Args:
        tensors: By the names of the model's checkpoint, of any device: what ``state_dict()`` of transformers' models returns.
        bucket_bytes: Tensors are staged together until they have so many bytes; a larger one is a bucket of its own.
        piece_bytes: The most bytes of tensors in a message; gRPC has a bound.
        options: Fields of the first message: ``weight_version``, ``partial``, ``in_flight``, ``update_id`` and others.
    """
    first = worker_pb2.UpdateWeightsRequest(**options)
    bucket: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield from _bucket_messages({each: tensors[each] for each in bucket}, piece_bytes, first)
            bucket, size, first = [], 0, worker_pb2.UpdateWeightsRequest()
        bucket.append(name)
        size += tensor.nbytes
    yield from _bucket_messages({each: tensors[each] for each in bucket}, piece_bytes, first)


def _bucket_messages(
    tensors: Mapping[str, Tensor], piece_bytes: int, first: worker_pb2.UpdateWeightsRequest
) -> Iterator[worker_pb2.UpdateWeightsRequest]:
    import torch
    import xxhash

    contents: list[memoryview] = []
    for name, tensor in tensors.items():
        whole = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        contents.append(whole.data)
        first.tensors.add(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            checksum=xxhash.xxh3_128_digest(whole.data),
        )
    yield first
    for content in contents:
        for start in range(0, len(content), piece_bytes):
            yield worker_pb2.UpdateWeightsRequest(data=bytes(content[start : start + piece_bytes]))
