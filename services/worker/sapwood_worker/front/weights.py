"""Updates of the model's weights as clients ask for them: tensors that come over a call are written into shared memory, staged
bucket by bucket, and exchanged when all are there.

Lives on the event loop. Updates are staged beside each other and exchanged one at a time. Bound: the bytes of one bucket of each
call in shared memory, besides what is staged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from sapwood.v1 import worker_pb2
from sapwood_common.errors import InvalidArgumentError, ResourceExhaustedError, SapwoodError
from sapwood_worker.ipc.messages import (
    ChangeWeights,
    DropWeights,
    ExchangeWeights,
    JoinGroup,
    LeaveGroup,
    ReadyWeights,
    StageWeights,
)
from sapwood_worker.records.weights import InFlight, TensorSpec, TrainerGroup, WeightBucket, WeightsFacts

logger = logging.getLogger(__name__)

_DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""By torch's name, what safetensors calls a type, and its bytes."""
_IN_FLIGHT: dict[int, InFlight] = {
    worker_pb2.IN_FLIGHT_REQUESTS_UNSPECIFIED: "retract",
    worker_pb2.IN_FLIGHT_REQUESTS_RETRACT: "retract",
    worker_pb2.IN_FLIGHT_REQUESTS_KEEP: "keep",
    worker_pb2.IN_FLIGHT_REQUESTS_ABORT: "abort",
}
_SHARED = Path("/dev/shm")
_MOST_VERSION = 128
"""Characters of a version's name."""
_MOST_STAGED = 16
_CHECKSUM_BYTES = 16
_KEPT_VERSIONS = 4096
"""Names that are kept for answers whose readers are slow."""


def to_in_flight(value: worker_pb2.InFlightRequests) -> InFlight:
    """What becomes of requests that run. Raises InvalidArgumentError if there is no such thing."""
    found = _IN_FLIGHT.get(value)
    if found is None:
        raise InvalidArgumentError("in_flight is unknown", field="in_flight")
    return found


class WeightsEngine(Protocol):
    """The way to the scheduler process, and what weights are called there."""

    weight_versions: dict[int, str]

    async def change_weights(self, make: Callable[[int], ChangeWeights]) -> WeightsFacts: ...

    async def change_memory(self, make: Callable[[int], ChangeWeights]) -> int: ...


@dataclass(slots=True)
class _Update:
    """An update that is being staged.

    Attributes:
        number: What the scheduler process calls it.
        paths: Where its tensors came from, as far as that lasts.
        tensors: How many are staged.
    """

    number: int
    paths: list[Path] = field(default_factory=list)
    tensors: int = 0


class Weights:
    """The weights in use, and updates of them.

    Args:
        engine: Changes them.
    """

    def __init__(self, engine: WeightsEngine) -> None:
        self._engine = engine
        self._updates = self._buckets = 0
        self._staged: dict[str, _Update] = {}
        self._exchanging = asyncio.Lock()
        self._number, self._digest = 0, b""
        self._before: tuple[str, Path | None] | None = None
        """The version that is kept, and where it came from."""
        self._source: Path | None = None
        """Where all of the weights in use can be read again; None: nowhere, or they are those of the start."""

    @property
    def version(self) -> str:
        """What the weights in use are called."""
        return self._engine.weight_versions[self._number]

    @property
    def state(self) -> worker_pb2.WeightsState:
        """The weights in use."""
        return worker_pb2.WeightsState(
            version=self.version, number=self._number, digest=self._digest, can_roll_back=self._before is not None
        )

    @property
    def staged(self) -> list[str]:
        """Ids of updates that are staged."""
        return sorted(self._staged)

    async def started(self) -> None:
        """A scheduler process has started again, with the weights of the start: has those read that were in use, if they still
        lie where they came from."""
        version, source, lost = self.version, self._source, self._number
        self._staged.clear()
        self._number, self._digest, self._before, self._source = 0, b"", None, None
        if source is None:
            if lost:
                logger.error("weights %s are lost; those of the start are served", version)
            return
        try:
            update = self._begin()
            await self._stage(update, source, {})
            await self._commit(update, version, partial=False, in_flight="keep", keep=False, flush=True)
        except SapwoodError as error:
            logger.error("weights %s cannot be read again, those of the start are served: %s", version, error.message)

    async def update(
        self, messages: AsyncIterator[worker_pb2.UpdateWeightsRequest]
    ) -> worker_pb2.UpdateWeightsResponse:
        """Carries out a call of UpdateWeights.

        Raises:
            InvalidArgumentError: It is wrong; names the field, and the tensor if one is.
            ResourceExhaustedError: There is no memory for it.
            UnimplementedError: This model's weights cannot be changed.
        """
        first = await _next(messages)
        if first is None:
            raise InvalidArgumentError("the call has no message")
        in_flight = to_in_flight(first.in_flight)
        if len(first.weight_version) > _MOST_VERSION:
            raise InvalidArgumentError(
                f"weight_version has more than {_MOST_VERSION} characters", field="weight_version"
            )
        if first.commit and not first.update_id:
            raise InvalidArgumentError("commit goes with update_id", field="commit")
        flush = first.flush_cache if first.HasField("flush_cache") else True
        if first.rollback:
            for name in ("path", "tensors", "data", "update_id", "partial"):
                if getattr(first, name):
                    raise InvalidArgumentError(f"{name} does not go with rollback", field=name)
            work = self._roll_back(first.weight_version, in_flight, keep=first.keep_previous, flush=flush)
            await asyncio.shield(work)
            return worker_pb2.UpdateWeightsResponse(weights=self.state, committed=True)
        commits = first.commit or not first.update_id
        update = self._staged.get(first.update_id) or self._begin(first.update_id)
        try:
            await self._take(update, first, messages)
            if commits:
                self._staged.pop(first.update_id, None)
                await asyncio.shield(
                    self._commit(
                        update,
                        first.weight_version,
                        partial=first.partial,
                        in_flight=in_flight,
                        keep=first.keep_previous,
                        flush=flush,
                    )
                )
        except BaseException:
            self._staged.pop(first.update_id, None)
            if self._number != update.number:
                await self._forget(update)
            raise
        return worker_pb2.UpdateWeightsResponse(weights=self.state, tensors=update.tensors, committed=commits)

    async def join_group(self, request: worker_pb2.JoinWeightsGroupRequest) -> None:
        """Joins a group that a trainer leads.

        Raises:
            InvalidArgumentError: A field is missing, or the group does not come to stand.
        """
        for name in ("group", "master_address", "master_port", "world_size"):
            if not getattr(request, name):
                raise InvalidArgumentError(f"{name} is missing", field=name)
        group = TrainerGroup(
            request.group,
            request.master_address,
            request.master_port,
            request.world_size,
            request.rank_offset,
            request.backend or "gloo",
        )
        await self._engine.change_memory(lambda call: JoinGroup(call, group))

    async def leave_group(self, name: str) -> bool:
        """Leaves such a group; returns whether there was one."""
        return bool(await self._engine.change_memory(lambda call: LeaveGroup(call, name)))

    async def drop(self, update_id: str) -> bool:
        """Forgets what is staged under an id; returns whether something was."""
        update = self._staged.pop(update_id, None)
        if update is not None:
            await self._engine.change_weights(lambda call: DropWeights(call, update.number))
        return update is not None

    async def _forget(self, update: _Update) -> None:
        """Drops an update that has failed, if the scheduler process has not."""
        with suppress(SapwoodError):
            await asyncio.shield(self._engine.change_weights(lambda call: DropWeights(call, update.number)))

    def _begin(self, update_id: str = "") -> _Update:
        if len(self._staged) >= _MOST_STAGED:
            raise ResourceExhaustedError(f"{_MOST_STAGED} updates are staged already: drop one", field="update_id")
        self._updates += 1
        update = _Update(self._updates)
        if update_id:
            self._staged[update_id] = update
        return update

    async def _take(
        self,
        update: _Update,
        first: worker_pb2.UpdateWeightsRequest,
        messages: AsyncIterator[worker_pb2.UpdateWeightsRequest],
    ) -> None:
        """Stages all tensors of a call."""
        if first.group:
            if first.path or first.data:
                raise InvalidArgumentError("a group goes without path and data", field="group")
            tensors = tuple(TensorSpec(each.name, each.dtype, tuple(each.shape)) for each in first.tensors)
            await self._stage(update, Path(), {}, first.group, tensors)
            return
        if first.path:
            path = Path(first.path)
            try:
                is_there = await asyncio.to_thread(path.exists)
            except OSError as error:  # a name that is too long, say
                raise InvalidArgumentError(f"{first.path[:100]}: {error.strerror}", field="path") from error
            if not is_there:
                raise InvalidArgumentError(f"{path} does not exist", field="path")
            if first.data:
                raise InvalidArgumentError("data does not go with path", field="data")
            await self._stage(update, path, {each.name: each.checksum for each in first.tensors if each.checksum})
            async for more in messages:
                if more.tensors or more.data:
                    raise InvalidArgumentError("a call with path has one message with tensors", field="tensors")
            return
        bucket: _Bucket | None = None
        message: worker_pb2.UpdateWeightsRequest | None = first
        try:
            while message is not None:
                if message.tensors:
                    if bucket is not None:
                        raise InvalidArgumentError(f"tensor {bucket.missing} has too few bytes", field="data")
                    bucket = await asyncio.to_thread(_Bucket, list(message.tensors))
                if message.data:
                    if bucket is None:
                        raise InvalidArgumentError("there are more bytes than tensors", field="data")
                    await asyncio.to_thread(bucket.write, message.data)
                if bucket is not None and not bucket.left:
                    bucket.file.close()
                    await self._stage(update, bucket.path, bucket.checksums)
                    await asyncio.to_thread(bucket.close)
                    bucket = None
                message = await _next(messages)
            if bucket is not None:
                raise InvalidArgumentError(f"tensor {bucket.missing} has too few bytes", field="data")
        finally:
            if bucket is not None:
                bucket.close()

    async def _stage(
        self,
        update: _Update,
        path: Path,
        checksums: dict[str, bytes],
        group: str = "",
        tensors: tuple[TensorSpec, ...] = (),
    ) -> None:
        self._buckets += 1
        bucket = WeightBucket(update.number, self._buckets, str(path), checksums, group, tensors)
        facts = await self._engine.change_weights(lambda call: StageWeights(call, bucket))
        update.tensors = facts.tensors
        update.paths.append(path)

    async def _commit(
        self, update: _Update, version: str, *, partial: bool, in_flight: InFlight, keep: bool, flush: bool
    ) -> None:
        async with self._exchanging:
            await self._engine.change_weights(lambda call: ReadyWeights(call, update.number, partial))
            before = self.version, self._source
            await self._exchange(
                ExchangeWeights(0, update.number, update.number, in_flight, keep, flush), version or str(update.number)
            )
            self._before = before if keep else None
            lasting = not partial and len(update.paths) == 1 and update.paths != [Path()]
            lasting = lasting and await asyncio.to_thread(update.paths[0].is_dir)
            self._source = update.paths[0] if lasting else None

    async def _roll_back(self, version: str, in_flight: InFlight, *, keep: bool, flush: bool) -> None:
        async with self._exchanging:
            if self._before is None:
                raise InvalidArgumentError("no weights are kept: keep_previous keeps them", field="rollback")
            before, (name, source) = (self.version, self._source), self._before
            self._updates += 1
            await self._exchange(ExchangeWeights(0, 0, self._updates, in_flight, keep, flush), version or name)
            self._before, self._source = before if keep else None, source

    async def _exchange(self, message: ExchangeWeights, version: str) -> None:
        versions = self._engine.weight_versions
        versions[message.number] = version  # before outputs name it
        for number in list(versions)[1 : len(versions) - _KEPT_VERSIONS]:
            del versions[number]
        try:
            facts = await self._engine.change_weights(
                lambda call: ExchangeWeights(
                    call, message.update, message.number, message.in_flight, message.keep, message.flush
                )
            )
        except SapwoodError:
            versions.pop(message.number, None)
            raise
        self._number, self._digest = message.number, facts.digest
        logger.info("weights %s are in use", version)


async def _next(
    messages: AsyncIterator[worker_pb2.UpdateWeightsRequest],
) -> worker_pb2.UpdateWeightsRequest | None:
    """The next message of a call; None: there is none."""
    try:
        return await anext(messages)
    except StopAsyncIteration:
        return None


class _Bucket:
    """A safetensors file in shared memory that is being written.

    Args:
        tensors: What it will hold.

    Attributes:
        path, file: The file.
        left: Bytes that are still to come.
        checksums: Of its tensors, where they are known.

    Raises:
        InvalidArgumentError: A tensor is described wrongly.
        ResourceExhaustedError: There is no room.
    """

    def __init__(self, tensors: list[worker_pb2.WeightTensor]) -> None:
        header: dict[str, object] = {}
        self._ends: list[tuple[int, str]] = []
        self.checksums: dict[str, bytes] = {}
        end = 0
        for each in tensors:
            found = _DTYPES.get(each.dtype.removeprefix("torch."))
            if not each.name or each.name in header:
                raise InvalidArgumentError(f"tensor {each.name!r} has no name, or is there twice", field="tensors")
            if found is None:
                raise InvalidArgumentError(f"tensor {each.name} has the unknown dtype {each.dtype!r}", field="tensors")
            if each.checksum and len(each.checksum) != _CHECKSUM_BYTES:
                raise InvalidArgumentError(
                    f"tensor {each.name}: a checksum has {_CHECKSUM_BYTES} bytes, not {len(each.checksum)}",
                    field="tensors",
                )
            name, size = found
            start, end = end, end + size * math.prod(each.shape)
            header[each.name] = {"dtype": name, "shape": list(each.shape), "data_offsets": [start, end]}
            self._ends.append((end, each.name))
            if each.checksum:
                self.checksums[each.name] = each.checksum
        self.left = self._total = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        parent = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
        if shutil.disk_usage(parent).free < end + len(text) + 8:
            raise ResourceExhaustedError(f"{parent} has no room for {end} bytes of tensors: send smaller buckets")
        self._folder = Path(tempfile.mkdtemp(prefix="sapwood-weights-", dir=parent))
        self.path = self._folder / "bucket.safetensors"
        self.file: BinaryIO = self.path.open("wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    @property
    def missing(self) -> str:
        """The first tensor that is not complete."""
        written = self._total - self.left
        return next(name for end, name in self._ends if end > written or not self._total)

    def write(self, data: bytes) -> None:
        """Appends bytes. Raises InvalidArgumentError if there are too many."""
        if len(data) > self.left:
            raise InvalidArgumentError("there are more bytes than tensors", field="data")
        self.file.write(data)
        self.left -= len(data)

    def close(self) -> None:
        """Removes the file; who maps it keeps it until then."""
        self.file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
