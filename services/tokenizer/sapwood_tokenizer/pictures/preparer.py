"""Prepares pictures and videos in processes (``ChildPool``), and keeps what was prepared.

A picture is found again by the digest of its file, of how it is wanted and of the tenant's salt, so it is decoded once. Bound:
the bytes of kept pixels; those that are used longest ago go first. An https URL that a tenant sent within the last minute is not
fetched again while its picture is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sapwood_common.child_pool import ChildDiedError, ChildPool, PoolLimits, TimeUpError
from sapwood_common.contract.pictures import PictureSpan, picture_digest
from sapwood_common.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from sapwood_common.models.image_processor import read_image_processor, read_video_processor
from sapwood_common.models.json_file import read_json_object
from sapwood_common.shared_bytes import SharedBytes
from sapwood_tokenizer.pictures.families.family import SEVERAL, PictureFamily, PictureSettings, Prepared, VideoFamily
from sapwood_tokenizer.pictures.families.registry import picture_family
from sapwood_tokenizer.pictures.fetching import Fetcher
from sapwood_tokenizer.pictures.videos import VideoLimits

_TOO_MANY = "too many pictures wait to be decoded"
_DETAILS = ("", "auto", "low", "high")
_LEAST_FETCHED = 1024 * 1024
"""Bytes that a fetch counts for at least."""
_FRESH_SECONDS, _MOST_URLS = 60.0, 4096
"""How long an answer of a host holds, and of how many URLs one is remembered."""


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """What requests may ask for, and what preparing may take.

    Attributes:
        most: Pictures and videos of a request.
        max_bytes: Bytes of a file.
        max_pixels: Pixels of a picture, or of a frame, before it is resized.
        seconds: Seconds that a picture may take, once it was fetched.
        processes: Pictures that are decoded at a time.
        memory_bytes: Memory of such a process.
        request_bytes: Pixels of all of a request's pictures, once they were resized.
        held_bytes: Pixels of all requests that are being prepared.
        cache_bytes: Pixels that are kept.
        frames: Frames of a video that a model is shown.
        video_seconds: Length of a video.
    """

    most: int
    max_bytes: int
    max_pixels: int
    seconds: float
    processes: int
    memory_bytes: int
    request_bytes: int
    held_bytes: int
    cache_bytes: int
    frames: int = 64
    video_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Source:
    """A picture or a video as it was sent.

    Attributes:
        content: The file, or its URL.
        detail: As OpenAI has it.
        field: What errors name.
        video: Whether it is a video.
    """

    content: bytes | str
    detail: str
    field: str
    video: bool = False

    @property
    def what(self) -> str:
        """Its name in errors."""
        return "video" if self.video else "picture"


class Placed:
    """A prepared picture at its place.

    Args:
        span: The place.
        picture: What was prepared.
    """

    __slots__ = ("picture", "span")

    def __init__(self, span: PictureSpan, picture: Prepared) -> None:
        self.span, self.picture = span, picture


class _Fetched:
    """Counts the bytes of a file that a host sends, until it was decoded. Each fetch counts for some bytes before any came, so
    that a slow host does not make connections without end.

    Args:
        shared: Where they count.
        owner: Whose they are.
    """

    def __init__(self, shared: SharedBytes, owner: str) -> None:
        self._shared, self._owner = shared, owner
        self._counted = self._held = 0

    def begin(self) -> None:
        """A host is asked. Raises ResourceExhaustedError as :meth:`hold`."""
        self._count(_LEAST_FETCHED)

    def hold(self, size: int) -> None:
        """Further bytes came. Raises ResourceExhaustedError where they are too many."""
        self._held += size
        if self._held > self._counted:
            self._count(self._held - self._counted)

    def release(self) -> None:
        """The file is not needed any more."""
        self._shared.release(self._owner, self._counted)

    def _count(self, size: int) -> None:
        self._shared.hold(self._owner, size)
        self._counted += size


class Preparer:
    """Prepares pictures for one model. Lives on one event loop. Made by :func:`start_preparer`.

    Args:
        name: The family's name.
        family: How the model takes pictures.
        tokens: The ids of the tokens that stand for parts of pictures, and of videos.
        pool: Decodes.
        fetcher: Gets the files.
        limits: What may be asked for.

    Attributes:
        name: The argument.
        prepared, reused, refused: How many pictures were decoded, were there already, and could not be used.
        seconds: How long fetching (``fetch``) and decoding (``decode``) have taken.
    """

    def __init__(
        self,
        name: str,
        family: PictureFamily,
        tokens: tuple[int, int | None],
        pool: ChildPool,
        fetcher: Fetcher,
        limits: PictureLimits,
    ) -> None:
        self.name = name
        self._family = family
        self._tokens = tokens
        marks = [each.marker for each in (family, family.video) if each is not None]
        self._marks = re.compile("|".join(f"({re.escape(mark)})" for mark in marks))
        self._pool = pool
        self._fetcher = fetcher
        self._limits = limits
        self._shared = SharedBytes(limits.held_bytes, "pictures")
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()
        self._bytes = 0
        self._urls: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self.prepared = self.reused = self.refused = 0
        self.seconds = {"fetch": 0.0, "decode": 0.0}

    @property
    def counts(self) -> dict[str, int]:
        """Pictures so far, by what became of them."""
        return {"decoded": self.prepared, "found": self.reused, "refused": self.refused}

    @contextlib.asynccontextmanager
    async def pictures_of(self, sources: Sequence[Source], salt: str) -> AsyncIterator[list[Prepared]]:
        """The pictures of a request, in order. Their pixels count as held by the salt's owner until the context ends.

        Raises:
            InvalidArgumentError: One cannot be fetched, decoded or taken; its field is named.
            ResourceExhaustedError: Too many wait, or requests hold too many pixels.
        """
        sizes: list[int] = []
        try:
            yield await self._prepare_all(sources, salt, sizes)
        finally:
            self._shared.release(salt, sum(sizes))

    async def _prepare_all(self, sources: Sequence[Source], salt: str, sizes: list[int]) -> list[Prepared]:
        """The pictures; ``sizes`` gets the bytes of each that is counted."""
        if len(sources) > self._limits.most:
            raise InvalidArgumentError(
                f"{len(sources)} pictures in a request: the most are {self._limits.most}",
                field=sources[self._limits.most].field,
            )
        for each in sources:
            if each.video and self._family.video is None:
                raise InvalidArgumentError("this model takes no videos", field=each.field)
            if each.detail not in _DETAILS:
                raise InvalidArgumentError(f"there is no detail {each.detail!r:.20}", field=f"{each.field}.detail")
        if self._family.of_several and sum(not each.video for each in sources) > 1:
            sources = [replace(each, detail=SEVERAL) for each in sources]
        tasks = [asyncio.create_task(self._prepare(each, salt)) for each in sources]
        try:
            for done in asyncio.as_completed(tasks):
                size = len((await done).pixels)
                self._shared.hold(salt, size)
                sizes.append(size)
                if sum(sizes) > self._limits.request_bytes:
                    raise InvalidArgumentError(
                        f"the pictures of a request have more than {self._limits.request_bytes} bytes of pixels: send "
                        "fewer or smaller ones",
                        field=sources[0].field,
                    )
            return [task.result() for task in tasks]
        finally:  # nothing goes on for a request that is refused
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def expand(self, text: str, pictures: Sequence[Prepared], field: str = "messages") -> str:
        """A text, or a rendered conversation, with what stands for its pictures in the place of their markers.

        Raises:
            InvalidArgumentError: It has more markers than pictures, or fewer.
        """
        marks = list(self._marks.finditer(text))
        if [mark.lastindex == 2 for mark in marks] != [each.video for each in pictures]:
            holds = " or ".join(repr(each.marker) for each in (self._family, self._family.video) if each is not None)
            raise InvalidArgumentError(
                f"the prompt shows {len(marks)} pictures of {len(pictures)}: the chat template takes none in some of "
                f"these messages, or a text holds {holds}",
                field=field,
            )
        found: list[str] = []
        at = 0
        for picture, mark in zip(pictures, marks, strict=True):
            found += text[at : mark.start()], self._family_of(picture).expand(picture.shape, picture.layout)
            at = mark.end()
        return "".join((*found, text[at:]))

    def _family_of(self, picture: Prepared) -> PictureFamily | VideoFamily:
        video = self._family.video
        return video if picture.video and video is not None else self._family

    def place(
        self, token_ids: Sequence[int], pictures: Sequence[Prepared], salt: str, field: str = "messages"
    ) -> list[Placed]:
        """Where the pictures are among the tokens of an expanded text.

        Raises:
            InvalidArgumentError: More tokens stand for pictures than they have, or fewer.
        """
        placed: list[Placed | None] = [None] * len(pictures)
        for video, token in enumerate(self._tokens):
            some = [index for index, each in enumerate(pictures) if each.video == bool(video)]
            family = self._family.video if video else self._family
            if token is None or family is None:
                continue
            places = [place for place, each in enumerate(token_ids) if each == token]
            counts = [family.count(pictures[index].shape, pictures[index].layout) for index in some]
            if sum(counts) != len(places):
                raise InvalidArgumentError(
                    f"{len(places)} tokens stand for {'videos' if video else 'pictures'} of {sum(counts)}: a text holds "
                    f"{family.token!r}",
                    field=field,
                )
            at = 0
            for index, count in zip(some, counts, strict=True):
                first, last, picture = places[at], places[at + count - 1], pictures[index]
                digest = picture_digest(salt, picture.shape, picture.layout, picture.pixels)
                placed[index] = Placed(PictureSpan(first, last - first + 1, token, digest), picture)
                at += count
        assert all(placed), "videos are prepared for no family that takes none"
        return [each for each in placed if each is not None]

    async def close(self) -> None:
        """Ends the processes."""
        await self._pool.close()

    async def _prepare(self, source: Source, salt: str) -> Prepared:
        try:
            return await self._found(source, salt)
        except InvalidArgumentError:
            self.refused += 1
            raise

    async def _found(self, source: Source, salt: str) -> Prepared:
        fetched = _Fetched(self._shared, salt)
        try:
            return await self._get(source, salt, fetched)
        finally:
            fetched.release()

    async def _get(self, source: Source, salt: str, fetched: _Fetched) -> Prepared:
        content, wanted = source.content, (salt.encode(), source.detail.encode(), source.what.encode())
        url = b""
        if isinstance(content, str):
            if content[:5].lower() != "data:":
                url = hashlib.sha256(b"\0".join((*wanted, content.encode(errors="replace")))).digest()
                if (known := self._still(url)) is not None:
                    return known
            began = time.monotonic()
            if url:
                fetched.begin()
            content = await self._fetcher.fetch(content, source.field, fetched.hold)
            self.seconds["fetch"] += time.monotonic() - began if url else 0.0
        elif len(content) > self._limits.max_bytes:
            raise InvalidArgumentError(
                f"a {source.what} of {len(content)} bytes: the most are {self._limits.max_bytes}", field=source.field
            )
        key = hashlib.sha256(b"\0".join((*wanted, content))).digest()
        if url:
            self._urls[url] = time.monotonic(), key
            if len(self._urls) > _MOST_URLS:
                self._urls.popitem(last=False)
        found = self._kept.get(key)
        if found is not None:
            self.reused += 1
            self._kept.move_to_end(key)
            return found
        began = time.monotonic()
        found = await self._decode(content, source, salt)
        self.seconds["decode"] += time.monotonic() - began
        self.prepared += 1
        if key not in self._kept:
            self._kept[key] = found
            self._bytes += len(found.pixels)
        while self._bytes > self._limits.cache_bytes and self._kept:
            self._bytes -= len(self._kept.popitem(last=False)[1].pixels)
        return found

    def _still(self, url: bytes) -> Prepared | None:
        """The picture that a host gave for a URL a short time ago, if it is kept."""
        at, key = self._urls.get(url, (0.0, b""))
        found = self._kept.get(key)
        if found is None or time.monotonic() > at + _FRESH_SECONDS:
            return None
        self.reused += 1
        self._kept.move_to_end(key)
        return found

    async def _decode(self, content: bytes, source: Source, salt: str) -> Prepared:
        detail = source.detail.encode()
        try:
            answer = await self._pool.ask(
                bytes([source.video, len(detail)]) + detail + content, salt, self._limits.seconds
            )
        except TimeUpError as error:
            if error.ran < error.waited:
                raise ResourceExhaustedError(_TOO_MANY, retry_after=1.0) from None
            raise InvalidArgumentError(
                f"the {source.what} was not decoded within {self._limits.seconds:.3g} s", field=source.field
            ) from None
        except ChildDiedError:
            raise InvalidArgumentError(
                f"decoding the {source.what} needs too much memory", field=source.field
            ) from None
        if not answer.startswith(b"+"):
            raise InvalidArgumentError(f"the {source.what} cannot be used: {answer[1:].decode()}", field=source.field)
        end = 5 + int.from_bytes(answer[1:5], "big")
        shape, layout = json.loads(answer[5:end])
        return Prepared(tuple(shape), tuple(layout), answer[end:], source.video)


async def start_preparer(
    directory: Path, tokenizer: Tokenizer, fetcher: Fetcher, limits: PictureLimits
) -> Preparer | None:
    """What prepares pictures for a model; None: it takes none, or is of a family that is not served.

    Args:
        directory: The model's; a file's model takes none.
        tokenizer: The model's.
        fetcher: Gets files.
        limits: What may be asked for.

    Raises:
        ConfigError: The model's files do not fit its family; names them.
    """
    read = _read(directory, tokenizer)
    if read is None:
        return None
    name, settings, family, tokens = read
    path = directory / "config.json"
    videos = VideoLimits(limits.max_pixels, limits.frames, limits.video_seconds, limits.request_bytes // 3)
    given = {**settings._asdict(), "videos": videos._asdict()}
    pool = ChildPool(
        "sapwood_tokenizer.pictures.prepare_process",
        json.dumps(given).encode(),
        PoolLimits(size=limits.processes, memory_bytes=limits.memory_bytes, cpu_seconds=int(limits.seconds) + 1),
        _TOO_MANY,
    )
    try:
        await pool.start()
    except (ChildDiedError, TimeoutError):
        await pool.close()
        raise ConfigError(
            f"{path}: pictures cannot be prepared: the process that decodes them does not start"
        ) from None
    return Preparer(name, family, tokens, pool, fetcher, limits)


def texts_of(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """The texts of the tokens that settings name by their ids."""
    found = {}
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool) and name.endswith(("_token_id", "_token_index")):
            text = tokenizer.id_to_token(value) if 0 <= value < 2**32 else None
            if text is not None:
                found[name] = text
    return found


def _read(
    directory: Path, tokenizer: Tokenizer
) -> tuple[str, PictureSettings, PictureFamily, tuple[int, int | None]] | None:
    """The family's name, the model's settings, how it takes pictures, and the ids of the tokens of pictures and of videos; None:
    it takes none."""
    path = directory / "config.json"
    if not directory.is_dir() or not path.exists():
        return None
    config = read_json_object(path)
    entry = picture_family(config)
    if entry is None:
        return None
    settings = PictureSettings(
        config, read_image_processor(directory), texts_of(config, tokenizer), read_video_processor(directory)
    )
    try:
        family = entry.make(settings)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: of pictures: {error}") from error
    token = tokenizer.token_to_id(family.token)
    if token is None:
        raise ConfigError(f"{path}: the tokenizer has no token {family.token!r:.60}, which stands for pictures")
    video = None if family.video is None else tokenizer.token_to_id(family.video.token)
    return entry.name, settings, family, (token, video)
