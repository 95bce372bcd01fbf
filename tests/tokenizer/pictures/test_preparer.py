"""Pictures are prepared in processes with bounds, once for a tenant, and as transformers' processors prepare them."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer

from sapwood_common.contract.pictures import picture_digest
from sapwood_common.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from sapwood_testing.models.vision_models import IMAGE, VISION, processor_of, save_tokenizer
from sapwood_tokenizer.pictures import preparer as preparing
from sapwood_tokenizer.pictures.families.family import PictureFamily, PictureSettings, Prepared
from sapwood_tokenizer.pictures.families.registry import picture_family
from sapwood_tokenizer.pictures.fetching import Fetcher
from sapwood_tokenizer.pictures.preparer import PictureLimits, Preparer, Source, start_preparer, texts_of
from sapwood_worker.model.vision.qwen2_vl import PatchGrid
from sapwood_worker.model.vision.tower import CLIP_MEAN, CLIP_STD, Normaliser
from tests.tokenizer.pictures.test_decoding import scanned

LIMITS = PictureLimits(3, 1 << 20, 4_000_000, 20.0, 2, 256 << 20, 2 << 20, 8 << 20, 1 << 20)


def folder_of(name: str, folder: Path) -> Path:
    """A model's files without its weights."""
    config = VISION[name].make().config
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"]
    config.save_pretrained(folder)
    save_tokenizer(folder, VISION[name].special)
    return folder


def png(image: Image.Image, **more: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, "PNG", **more)
    return made.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@asynccontextmanager
async def preparer(folder: Path, limits: PictureLimits = LIMITS) -> AsyncIterator[Preparer]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = await start_preparer(folder, tokenizer, Fetcher(max_bytes=limits.max_bytes), limits)
    assert made is not None
    try:
        yield made
    finally:
        await made.close()


async def prepare(made: Preparer, sources: list[Source], salt: str) -> list[Prepared]:
    """A request's pictures, as if its response were made at once."""
    async with made.pictures_of(sources, salt) as pictures:
        return pictures


def source(content: bytes | str, detail: str = "") -> Source:
    return Source(content, detail, "messages[0].items[0]")


async def test_a_picture_is_decoded_once_for_a_tenant_and_again_for_another(qwen: Path) -> None:
    async with preparer(qwen) as made:
        file = png(noise(100, 60))
        first, again = (await prepare(made, [source(file)], "a"))[0], (await prepare(made, [source(file)], "a"))[0]
        assert again is first
        assert (made.prepared, made.reused) == (1, 1)
        (other,) = await prepare(made, [source(file)], "b")
        assert (made.prepared, made.reused) == (2, 1)
        assert other == first
        digests = {picture_digest(salt, first.shape, first.layout, first.pixels) for salt in "ab"}
        assert len(digests) == 2
        (small,) = await prepare(made, [source(file, "low")], "a")
        assert made.prepared == 3
        assert small.shape[1] * small.shape[2] <= first.shape[1] * first.shape[2]


async def test_what_is_kept_has_a_bound(qwen: Path) -> None:
    async with preparer(qwen, replace(LIMITS, cache_bytes=60_000)) as made:
        files = [png(noise(100, 60, seed)) for seed in range(4)]
        for file in files:
            await prepare(made, [source(file)], "")
        await prepare(made, [source(files[-1])], "")
        await prepare(made, [source(files[0])], "")
        assert (made.prepared, made.reused) == (5, 1)


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ([source(png(noise(8, 8)))] * 4, "4 pictures in a request: the most are 3"),
        ([source(bytes((1 << 20) + 1))], "a picture of 1048577 bytes: the most are 1048576"),
        ([source("data:;base64," + "A" * (1 << 21))], "the most are 1048576"),
        ([source(png(Image.new("L", (2500, 2500))))], "2500 x 2500 pixels: the most are 4000000"),
        ([source(png(noise(8, 8)), "huge")], "there is no detail 'huge'"),
        ([source(png(noise(1, 400)))], "one side is more than 200 times the other"),
        ([source(b"GIF89a")], "cannot be used"),
    ],
)
async def test_each_limit_is_named_with_the_field(sources: list[Source], says: str, qwen: Path) -> None:
    async with preparer(qwen) as made:
        with pytest.raises(InvalidArgumentError, match=says) as caught:
            await prepare(made, sources, "")
        assert str(caught.value.field).startswith("messages[0].items[0]")
        assert made.counts == {"decoded": 0, "found": 0, "refused": int(len(sources) == 1 and not sources[0].detail)}


async def test_decoding_that_takes_too_much_memory_or_time_is_ended_and_others_go_on(qwen: Path) -> None:
    large = png(Image.new("RGB", (9000, 9000)), compress_level=9)
    limits = replace(LIMITS, max_pixels=100_000_000, memory_bytes=96 << 20)
    async with preparer(qwen, limits) as made:
        with pytest.raises(InvalidArgumentError, match="too much memory"):
            await prepare(made, [source(large)], "")
        assert await prepare(made, [source(png(noise(50, 50)))], "")
    limits = replace(limits, memory_bytes=1 << 30, seconds=0.02)
    async with preparer(qwen, limits) as made:
        with pytest.raises(InvalidArgumentError, match="not decoded within"):
            await prepare(made, [source(large)], "")


async def test_a_jpeg_of_many_scans_is_ended_by_time_and_the_next_picture_is_decoded(qwen: Path) -> None:
    slow = scanned(80, 3000)
    assert len(slow) < 100_000
    async with preparer(qwen, replace(LIMITS, max_pixels=10_000_000, memory_bytes=1 << 30, seconds=0.4)) as made:
        with pytest.raises(InvalidArgumentError, match=r"the picture was not decoded within 0\.4 s"):
            await prepare(made, [source(slow)], "")
        assert made.refused == 1
    async with preparer(qwen, replace(LIMITS, seconds=20.0)) as made:
        assert await prepare(made, [source(png(noise(50, 50)))], "")


async def test_beyond_the_bound_of_a_requests_pixels_no_picture_is_decoded(qwen: Path) -> None:
    files = [png(noise(100, 60, seed)) for seed in range(8)]
    async with preparer(qwen, replace(LIMITS, most=8)) as made:
        (one,) = await prepare(made, [source(files[0])], "a")
    size = len(one.pixels)
    async with preparer(qwen, replace(LIMITS, most=8, request_bytes=2 * size)) as made:
        assert len(await prepare(made, [source(file) for file in files[:2]], "a")) == 2
        with pytest.raises(InvalidArgumentError, match=f"more than {2 * size} bytes of pixels"):
            await prepare(made, [source(file) for file in files], "b")
        before = made.prepared
        assert before < 2 + len(files)
        await prepare(made, [source(files[0])], "c")
        assert made.prepared == before + 1


async def test_pixels_of_all_requests_have_a_bound_that_tenants_share(qwen: Path) -> None:
    files = [png(noise(100, 60, seed)) for seed in range(4)]
    async with preparer(qwen) as made:
        size = len((await prepare(made, [source(files[0])], "a"))[0].pixels)
    async with preparer(qwen, replace(LIMITS, held_bytes=4 * size)) as made:
        async with made.pictures_of([source(each) for each in files[:2]], "a"):
            with pytest.raises(ResourceExhaustedError, match="pictures of running requests"):
                await prepare(made, [source(files[2])], "a")
            assert await prepare(made, [source(files[3])], "b")
        assert await prepare(made, [source(files[2])], "a")


def test_texts_that_hold_a_marker_are_refused(qwen: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(qwen).to_dict()
    family = family_of("qwen2_5_vl", qwen)
    made = Preparer("qwen_vl", family, (IMAGE, IMAGE + 1), None, Fetcher(), LIMITS)  # type: ignore[arg-type]
    picture = family.prepare(noise(56, 56), "")
    assert config["image_token_id"] == IMAGE
    assert made.expand("a <|image_pad|> b", [picture]) == "a " + "<|image_pad|>" * 4 + " b"
    for text in ("a b", "<|image_pad|><|image_pad|>"):
        with pytest.raises(InvalidArgumentError, match="a text holds"):
            made.expand(text, [picture])
    with pytest.raises(InvalidArgumentError, match="5 tokens stand for pictures of 4"):
        made.place([IMAGE] * 5, [picture], "")


def family_of(name: str, folder: Path) -> PictureFamily:
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    entry = picture_family(config)
    assert entry is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return entry.make(PictureSettings(config, VISION[name].processor, texts_of(config, tokenizer)))


def as_transformers_has_it(name: str, pixels: torch.Tensor) -> torch.Tensor:
    """Our pixels in the form of what transformers' processor returns."""
    if name == "llama4":
        return (pixels.bfloat16() * (1 / 255) - 0.5).div(0.5).permute(0, 3, 1, 2).float()
    given = VISION[name].processor
    numbers = Normaliser(given, CLIP_MEAN, CLIP_STD)(pixels)
    return PatchGrid(int(given["patch_size"]), 2, 2).cut(numbers) if name.startswith("qwen") else numbers


@pytest.mark.parametrize("name", list(VISION))
def test_pixels_equal_those_of_transformers_for_pictures_of_any_size(name: str, tmp_path: Path) -> None:
    family = family_of(name, folder_of(name, tmp_path))
    processor = processor_of(VISION[name])
    draw = random.Random(3)
    for seed in range(12):
        image = noise(draw.randint(30, 400), draw.randint(30, 400), seed)
        found = family.prepare(image, "")
        ours = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(*found.shape, 3)
        theirs = processor(images=[image], return_tensors="pt")["pixel_values"]
        theirs = theirs.flatten(0, -4) if theirs.dim() > 4 else theirs
        torch.testing.assert_close(as_transformers_has_it(name, ours), theirs.float(), atol=2e-6, rtol=0)


async def test_a_url_is_fetched_once_a_minute_for_a_tenant_while_its_picture_is_kept(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def fetch(self: Fetcher, url: str, field: str, hold: Callable[[int], None]) -> bytes:
        asked.append(url)
        return png(noise(100, 60))

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    async with preparer(qwen) as made:
        link = source("https://a.example/one.png")
        for _ in range(3):
            await prepare(made, [link], "a")
        assert (len(asked), made.prepared, made.reused) == (1, 1, 2)
        assert made.seconds["decode"] > 0
        await prepare(made, [link], "b")
        assert len(asked) == 2, "another tenant learns nothing"
        await prepare(made, [source("https://a.example/two.png")], "a")
        assert (len(asked), made.prepared) == (3, 2), "the same file at another URL is fetched, and not decoded"
        monkeypatch.setattr(preparing, "_FRESH_SECONDS", -1.0)
        await prepare(made, [link], "a")
        assert len(asked) == 4


async def test_a_family_that_takes_several_pictures_otherwise_gets_them_so(tmp_path: Path) -> None:
    folder = folder_of("llava_onevision", tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps(VISION["llava_onevision"].processor))
    async with preparer(folder) as made:
        first, other = source(png(noise(100, 60))), source(png(noise(60, 100, 1)))
        (alone,) = await prepare(made, [first], "")
        together = await prepare(made, [first, other], "")
        assert alone.shape[0] > 1
        assert [each.shape[0] for each in together] == [1, 1]
        assert (made.prepared, made.reused) == (3, 0)


async def test_models_that_see_nothing_have_nothing_prepared(
    tmp_path: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
    assert await start_preparer(qwen / "tokenizer.json", tokenizer, Fetcher(), LIMITS) is None
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert await start_preparer(tmp_path, tokenizer, Fetcher(), LIMITS) is None
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2_5_VLForConditionalGeneration"]}')
    with pytest.raises(ConfigError, match=r"config\.json: of pictures: image_token_id names no token"):
        await start_preparer(tmp_path, tokenizer, Fetcher(), LIMITS)


class SlowHost(Fetcher):
    """A host whose files come in pieces of half a megabyte, and end when they may."""

    def __init__(self) -> None:
        super().__init__(["host"])
        self.asked = 0
        self.end = asyncio.Event()

    async def fetch(self, url: str, field: str, hold: Callable[[int], None] = lambda _: None) -> bytes:
        self.asked += 1
        for _ in range(1 if url.endswith("small") else 6):
            hold(512 * 1024)
            await asyncio.sleep(0)
        await self.end.wait()
        return png(noise(40, 40))


async def test_files_that_hosts_send_count_as_held_from_the_first_byte_until_they_are_decoded(qwen: Path) -> None:
    async with preparer(qwen) as made:
        slow = made._fetcher = SlowHost()
        asks = [asyncio.create_task(prepare(made, [source(f"https://host/{index}")], "a")) for index in range(20)]
        while slow.asked < 20 and not any(each.done() for each in asks):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert 0 < made._shared.total <= LIMITS.held_bytes
        refused = [each for each in asks if each.done()]
        assert refused and all(isinstance(each.exception(), ResourceExhaustedError) for each in refused)
        other = asyncio.create_task(prepare(made, [source("https://host/small")], "b"))
        await asyncio.sleep(0.05)
        assert not other.done(), "another tenant finds room"
        slow.end.set()
        await asyncio.gather(other, *(each for each in asks if each not in refused))
        assert made._shared.total == 0
