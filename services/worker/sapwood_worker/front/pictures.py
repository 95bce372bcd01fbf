"""Takes the pictures of a request: checks what does not need the model, and each digest."""

from __future__ import annotations

import asyncio
from array import array

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.contract.pictures import picture_digest
from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.pictures import Picture

_AT_ONCE = 1 << 20
"""Bytes of pixels above which digests are computed in a thread."""
_MOST_NUMBERS = 16
"""Numbers of a layout."""


async def to_pictures(request: worker_pb2.WorkerGenerateRequest, info: ModelInfo) -> tuple[Picture, ...]:
    """The pictures of a request.

    A client sends a picture with its digest, under which others may find what is cached for it. So the digest is computed again
    here.

    Args:
        request: The request.
        info: The model.

    Raises:
        InvalidArgumentError: The model takes none, or one is not what it says; the field is named.
    """
    if not request.pictures:
        return ()
    if info.pictures is None:
        raise InvalidArgumentError("this model takes no pictures", field="pictures")
    size = sum(len(each.pixels) for each in request.pictures)
    if size > info.pictures.most_bytes:
        raise InvalidArgumentError(
            f"the pictures have {size} bytes of pixels; the most are {info.pictures.most_bytes}", field="pictures"
        )
    tokens, end = array("I", request.token_ids), 0
    most = len(tokens) - request.output_tokens
    for index, each in enumerate(request.pictures):
        field = f"pictures[{index}]"
        if not end <= each.offset < each.offset + each.length <= most:
            raise InvalidArgumentError(
                f"places {each.offset} to {each.offset + each.length - 1} are not free", field=field
            )
        end = each.offset + each.length
        if tokens[each.offset] not in info.pictures.tokens:
            raise InvalidArgumentError(f"the token at its place is {tokens[each.offset]}, not a picture's", field=field)
        if len(each.layout) > _MOST_NUMBERS or len(each.pixels) != 3 * each.tiles * each.height * each.width:
            raise InvalidArgumentError(f"{len(each.pixels)} bytes are not its pixels", field=field)
    if size > _AT_ONCE:
        return await asyncio.to_thread(_checked, request)
    return _checked(request)


def _checked(request: worker_pb2.WorkerGenerateRequest) -> tuple[Picture, ...]:
    return tuple(_picture(each, request.cache_salt, f"pictures[{i}]") for i, each in enumerate(request.pictures))


def _picture(given: common_pb2.Picture, salt: str, field: str) -> Picture:
    shape, layout = (given.tiles, given.height, given.width), tuple(given.layout)
    if picture_digest(salt, shape, layout, given.pixels) != given.digest:
        raise InvalidArgumentError(
            "its digest is not that of its pixels under this cache_salt", field=f"{field}.digest"
        )
    return Picture(given.offset, given.length, given.digest, shape, layout, given.pixels)
