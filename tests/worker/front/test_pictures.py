"""Pictures in a request to a worker: what does not fit is refused by its field, and nobody can name pixels that are not his."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.v1 import common_pb2, worker_pb2
from sapwood_common.contract.pictures import picture_digest
from sapwood_common.errors import InvalidArgumentError
from sapwood_worker.front.pictures import to_pictures
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.pictures import PictureInfo

PAD = 9
INFO = ModelInfo(
    architecture="qwen2", dtype="float32", context_length=100, vocab_size=10, eos_token_ids=(), page_size=4, num_pages=9,
    pictures=PictureInfo("qwen2_vl", (PAD,), False, 3_000_000),
)  # fmt: skip


def picture(offset: int = 1, length: int = 2, salt: str = "", **changes: Any) -> common_pb2.Picture:
    shape = changes.pop("shape", (1, 2, 2))
    pixels = changes.pop("pixels", bytes(range(12)))
    digest = changes.pop("digest", picture_digest(salt, shape, (), pixels))
    tiles, height, width = shape
    return common_pb2.Picture(
        offset=offset, length=length, digest=digest, tiles=tiles, height=height, width=width, pixels=pixels, **changes
    )


def request(*pictures: common_pb2.Picture, **more: Any) -> worker_pb2.WorkerGenerateRequest:
    tokens = more.pop("token_ids", [1, PAD, PAD, 2, PAD, PAD, 3])
    return worker_pb2.WorkerGenerateRequest(token_ids=tokens, pictures=pictures, **more)


async def test_pictures_come_with_their_places_and_pixels() -> None:
    first, second = await to_pictures(request(picture(), picture(4), cache_salt=""), INFO)
    assert (first.offset, first.end, second.offset, second.end) == (1, 3, 4, 6)
    assert (first.shape, first.pixels) == ((1, 2, 2), bytes(range(12)))
    assert await to_pictures(request(), INFO) == ()


async def test_many_pixels_are_checked_alike() -> None:
    pixels = bytes(3 * 1000 * 500)
    (found,) = await to_pictures(request(picture(shape=(1, 1000, 500), pixels=pixels)), INFO)
    assert found.pixels == pixels
    with pytest.raises(InvalidArgumentError, match="digest is not that"):
        await to_pictures(request(picture(shape=(1, 1000, 500), pixels=pixels, digest=b"x")), INFO)


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        (request(picture(0)), "pictures[0]", "the token at its place is 1"),
        (request(picture(4), picture(1)), "pictures[1]", "are not free"),
        (request(picture(), picture(2)), "pictures[1]", "are not free"),
        (request(picture(length=0)), "pictures[0]", "are not free"),
        (request(picture(4, 9)), "pictures[0]", "are not free"),
        (request(picture(4), output_tokens=2), "pictures[0]", "are not free"),
        (request(picture(shape=(1, 2, 3))), "pictures[0]", "12 bytes are not its pixels"),
        (request(picture(layout=range(99))), "pictures[0]", "are not its pixels"),
        (request(picture(digest=bytes(32))), "pictures[0].digest", "not that of its pixels"),
        (request(picture(salt="tenant")), "pictures[0].digest", "under this cache_salt"),
        (request(picture(shape=(1, 1100, 1000), pixels=bytes(3_300_000))), "pictures", "the most are 3000000"),
    ],
)
async def test_a_picture_with_a_wrong_digest_or_place_is_refused_by_field(
    given: worker_pb2.WorkerGenerateRequest, field: str, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        await to_pictures(given, INFO)
    assert caught.value.field == field


async def test_a_model_without_a_vision_part_takes_no_picture() -> None:
    blind = ModelInfo(
        architecture="llama",
        dtype="float32",
        context_length=9,
        vocab_size=10,
        eos_token_ids=(),
        page_size=4,
        num_pages=9,
    )
    with pytest.raises(InvalidArgumentError, match="takes no pictures") as caught:
        await to_pictures(request(picture()), blind)
    assert caught.value.field == "pictures"
