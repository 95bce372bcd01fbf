"""What trainers call, by SGLang's and by vLLM's names: weights, sleep, pauses, loads. Only with an operator's key.

Each call is there for all workers, and below ``/workers/ID/`` for one: trainers read ``/workers`` and call each URL that it
lists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from sapwood_common.errors import InvalidArgumentError, NotFoundError, SapwoodError, UnimplementedError
from sapwood_router.edges.guard import tenant_var
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import convert, decode_object
from sapwood_router.edges.http1.errors import HttpError
from sapwood_router.edges.routes import Ask, Post, Route
from sapwood_router.flow.generation import Pipeline
from sapwood_router.flow.training import Memory, PauseHow, Training, TrainingTargets

_FOLDER = "/workers/"
_TRANSFER = "vllm"
"""The group of vLLM's calls, which do not name one."""
_TAGS: dict[str, list[Memory]] = {
    "weights": ["weights"],
    "kv_cache": ["kv_cache"],
    "cuda_graph": [],  # those stay
    "scheduling": [],  # the end of a pause, which waking is, too
}
_PAUSES: dict[str, PauseHow] = {
    "abort": "abort", "retract": "retract", "in_place": "keep", "keep": "keep", "wait": "wait"
}  # fmt: skip

Given = dict[str, Any]
Told = tuple[int, Any]
"""A status, and what is answered as JSON."""
Answer = Callable[[Exchange, Given, TrainingTargets], Awaitable[Told]]


class DiskUpdate(msgspec.Struct):
    """``POST /update_weights_from_disk``."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None
    load_format: str | None = None


class GroupBody(msgspec.Struct):
    """``POST /init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str | None = None
    backend: str | None = None
    pp_rank: int | None = None


class GroupUpdate(msgspec.Struct):
    """``POST /update_weights_from_distributed``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: str | None = None


class TransferBody(msgspec.Struct):
    """``POST /init_weight_transfer_engine``."""

    init_info: GroupBody


class UpdateInfo(msgspec.Struct):
    """What ``POST /update_weights`` has."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None


class UpdateBody(msgspec.Struct):
    """``POST /update_weights``."""

    update_info: UpdateInfo


class Tags(msgspec.Struct):
    """``POST /release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: list[str] | None = None


class PauseBody(msgspec.Struct):
    """``POST /pause_generation``."""

    mode: str | None = None


class TrainingCalls:
    """The paths.

    Args:
        training: Does what they ask for.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        posts: dict[str, Answer] = {
            "update_weights_from_disk": _update_from_disk,
            "update_weights_from_tensor": _refuse_pickles,
            "update_weights_from_distributed": _receive,
            "init_weights_update_group": _join_group,
            "init_weight_transfer_engine": _join_transfer,
            "start_weight_update": _begin,
            "update_weights": _receive_transfer,
            "finish_weight_update": _finish,
            "destroy_weights_update_group": _leave_group,
            "release_memory_occupation": _release,
            "resume_memory_occupation": _resume_memory,
            "sleep": _sleep,
            "wake_up": _wake_up,
            "pause": _pause_by_query,
            "resume": _resume,
            "pause_generation": _pause,
            "continue_generation": _resume,
            "flush_cache": _flush,
            "reset_prefix_cache": _flush,
        }
        gets: dict[str, Answer] = {
            "get_weight_version": _show_version,
            "weight_version": _show_version,
            "get_world_size": _show_ranks,
            "is_sleeping": _show_sleep,
            "v1/loads": _show_loads,
            "flush_cache": _flush,
            "health": _show_health,
        }
        self._calls: dict[str, dict[str, Answer]] = {"POST": posts, "GET": gets}

    def routes(self, served: frozenset[tuple[str, str]]) -> list[Route]:
        """The routes.

        Args:
            served: Methods and paths that others serve already.
        """
        routes: list[Route] = [
            Ask("/workers", self.list_workers, summary="Lists the workers, with URLs for trainers"),
            Ask(_FOLDER, self.ask_one, summary="ID/CALL: tells trainers of one worker"),
            Post(_FOLDER, self.tell_one, summary="ID/CALL: has one worker do what trainers ask for"),
        ]
        posts = [name for name in self._calls["POST"] if ("POST", f"/{name}") not in served]
        gets = [name for name in self._calls["GET"] if ("GET", f"/{name}") not in served]
        routes += [Post(f"/{name}", self.tell_all, summary="Has all workers do so, for trainers") for name in posts]
        routes += [Ask(f"/{name}", self.ask_all, summary="Tells trainers of all workers") for name in gets]
        return routes

    async def list_workers(self, exchange: Exchange) -> None:
        """Lists the workers; each URL takes the same calls for that worker."""
        _assure_operator()
        host = exchange.headers.get(b"host", b"localhost").decode("latin-1")
        rows = [
            {
                "id": (name := exchange.workers.id_of(each.address)),
                "url": f"http://{host}{_FOLDER}{name}",
                "model_id": each.model,
                "worker_type": "regular",
                "is_healthy": not each.asleep,
                "weight_version": each.weight_version,
            }
            for each in self._training.workers()
        ]
        await exchange.send_body(200, msgspec.json.encode({"workers": rows, "total": len(rows)}))

    async def tell_all(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Has all workers do something."""
        await self._answer(exchange, exchange.path.strip("/"), body, None)

    async def ask_all(self, exchange: Exchange) -> None:
        """Tells of all workers."""
        await self._answer(exchange, exchange.path.strip("/"), b"", None)

    async def tell_one(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Has one worker do something."""
        worker, _, call = exchange.path.removeprefix(_FOLDER).strip("/").partition("/")
        await self._answer(exchange, call, body, worker)

    async def ask_one(self, exchange: Exchange) -> None:
        """Tells of one worker."""
        worker, _, call = exchange.path.removeprefix(_FOLDER).strip("/").partition("/")
        await self._answer(exchange, call, b"", worker)

    async def _answer(self, exchange: Exchange, name: str, body: bytes, worker: str | None) -> None:
        """Answers a call, for one worker or for all.

        Raises:
            HttpError: The caller's key is no operator's: 403.
            NotFoundError: There is no such call, or no such worker.
            UnimplementedError: It is refused here; says what to call instead.
        """
        _assure_operator()
        answer = self._calls.get(exchange.method, {}).get(name)
        if answer is None:
            raise NotFoundError(f"there is no {exchange.method} {exchange.path}")
        given = decode_object(body) if body.strip() else {}
        try:
            status, content = await answer(exchange, given, self._training.targets(worker, exchange.workers.id_of))
        except (UnimplementedError, NotFoundError):
            raise
        except SapwoodError as error:
            if exchange.method == "GET":
                raise
            # As trainers read it: they look at success, and show the message.
            status, content = 400, {"success": False, "message": exchange.workers.hide(error.message)}
        await exchange.send_body(status, msgspec.json.encode(content))


async def _update_from_disk(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    neutral = {"is_async": (False,), "keep_pause": (False,), "recapture_cuda_graph": (False,), "token_step": (0,)}
    request = convert(given, DiskUpdate, neutral, left_out=exchange.left_out)
    if request.load_format not in (None, "auto", "safetensors"):
        raise InvalidArgumentError(f"load_format {request.load_format!r} is not read", field="load_format")
    version = await targets.update(
        request.model_path,
        request.weight_version or "",
        "abort" if request.abort_all_requests else "retract",
        flush=request.flush_cache is not False,
    )
    message = f"the weights are {version} now"
    return 200, {"success": True, "message": message, "num_paused_requests": 0, "weight_version": version}


async def _refuse_pickles(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    raise UnimplementedError(
        "pickled tensors are not read: write them with safetensors, to /dev/shm say, and give /update_weights_from_disk "
        "the file's path as model_path; or stream them by gRPC's UpdateWeights"
    )


async def _join_group(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    group = convert(given, GroupBody, {}, left_out=exchange.left_out)
    name, backend = group.group_name or "weight_update_group", group.backend or "nccl"
    await targets.join_group(
        name, group.master_address, group.master_port, group.world_size, group.rank_offset, backend
    )
    return 200, {"success": True, "message": f"group {name} stands"}


async def _leave_group(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    await targets.leave_group(str(given.get("group_name") or "weight_update_group"))
    return 200, {"success": True, "message": "there is no such group any more"}


async def _receive(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    request = convert(given, GroupUpdate, {}, left_out=exchange.left_out)
    if request.load_format:
        raise InvalidArgumentError(
            f"load_format {request.load_format!r} is not read: broadcast the tensors one by one", field="load_format"
        )
    if not len(request.names) == len(request.dtypes) == len(request.shapes):
        raise InvalidArgumentError("names, dtypes and shapes are not equally many", field="names")
    version = await targets.receive(
        request.group_name or "weight_update_group",
        list(zip(request.names, request.dtypes, request.shapes, strict=True)),
        request.weight_version or "",
        "abort" if request.abort_all_requests else "retract",
        flush=request.flush_cache is not False,
    )
    return 200, {"success": True, "message": f"the weights are {version} now"}


# The same by vLLM's names: one group, and an update of several calls that begins and ends.


async def _join_transfer(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    group = convert(given, TransferBody, {}, left_out=exchange.left_out).init_info
    backend = group.backend or "nccl"
    await targets.join_group(
        _TRANSFER, group.master_address, group.master_port, group.world_size, group.rank_offset, backend
    )
    return 200, {"message": "Weight transfer initialized"}


async def _begin(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    if given.get("is_checkpoint_format", True) is not True:
        raise InvalidArgumentError("tensors are read by a checkpoint's names only", field="is_checkpoint_format")
    await targets.begin()
    return 200, {"message": "Weight update started"}


async def _receive_transfer(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    info = convert(given, UpdateBody, {}, left_out=exchange.left_out).update_info
    if info.packed:
        raise InvalidArgumentError("packed tensors are not read: broadcast them one by one", field="update_info.packed")
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise InvalidArgumentError("names, dtype_names and shapes are not equally many", field="update_info.names")
    tensors = list(zip(info.names, info.dtype_names, info.shapes, strict=True))
    await targets.receive(_TRANSFER, tensors, "", "retract", flush=True)
    return 200, {"message": "Weights updated"}


async def _finish(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    return 200, {"message": f"the weights are {await targets.finish()} now"}


async def _show_ranks(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    return 200, {"world_size": await targets.ranks()}


async def _show_version(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    versions = await targets.versions()
    return 200, {"weight_version": versions[0]} | ({"weight_versions": versions} if len(versions) > 1 else {})


async def _release(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    tags = convert(given, Tags, {}, left_out=exchange.left_out).tags
    await targets.sleep(_memory(tags or []), abort=False)
    return 200, {}


async def _resume_memory(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    tags = convert(given, Tags, {}, left_out=exchange.left_out).tags
    await targets.wake_up(_memory(tags or []))
    return 200, {}


async def _sleep(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    level = exchange.query.get("level", "1")
    if level not in ("0", "1", "2"):
        raise InvalidArgumentError(f"level is {level!r}; it can be 0, 1 or 2", field="level")
    if level == "0":
        await targets.pause("keep")
    else:
        await targets.sleep([], abort=exchange.query.get("mode", "abort") == "abort")
    return 200, {}


async def _wake_up(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    tags = [each for each in exchange.query.get("tags", "").split(",") if each]
    if not tags or _memory(tags):
        await targets.wake_up(_memory(tags))
    await targets.resume()
    return 200, {}


async def _show_sleep(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    return 200, {"is_sleeping": await targets.asleep()}


async def _pause(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    mode = convert(given, PauseBody, {}, left_out=exchange.left_out).mode
    return 200, {"status": "ok", "aborted": await _paused(exchange, targets, _how(mode or "abort"))}


async def _pause_by_query(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    how = _how(exchange.query.get("mode", "abort"))
    aborted = await _paused(exchange, targets, how)
    if how != "keep" and exchange.query.get("clear_cache", "true") == "true":
        await targets.flush(only_idle=False)
    return 200, {"status": "paused", "aborted": aborted}


async def _paused(exchange: Exchange, targets: TrainingTargets, how: PauseHow) -> int:
    if how == "wait":
        exchange.on_disconnect(lambda: None)  # ends the wait, and undoes the pause
    return await targets.pause(how)


async def _resume(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    await targets.resume()
    return 200, {"status": "ok"}


async def _flush(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    if not await targets.flush(only_idle=True):
        return 400, {"success": False, "message": "requests are running or waiting: nothing was flushed"}
    return 200, {"success": True, "message": "the caches are empty"}


async def _show_loads(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    loads = await targets.loads()
    of_ranks = [
        {
            "dp_rank": rank,
            "num_running_reqs": each.running,
            "num_waiting_reqs": each.waiting,
            "num_total_reqs": each.running + each.waiting,
            "num_reqs": each.running + each.waiting,
            "num_used_tokens": each.tokens,
        }
        for rank, each in enumerate(loads)
    ]
    total = {
        "total_running_reqs": sum(each.running for each in loads),
        "total_waiting_reqs": sum(each.waiting for each in loads),
    }
    return 200, {"dp_rank_count": len(of_ranks), "loads": of_ranks, "aggregate": total}


async def _show_health(exchange: Exchange, given: Given, targets: TrainingTargets) -> Told:
    return 200, {"status": "ok"}


def _assure_operator() -> None:
    tenant = tenant_var.get()
    if tenant is None or not tenant.settings.operator:
        raise HttpError(403, "this is for operators: `sapwood key NAME --operator` makes a key for --api-keys that may")


def _memory(tags: list[str]) -> list[Memory]:
    """The memory that tags name. Raises InvalidArgumentError for one that is unknown."""
    for tag in tags:
        if tag not in _TAGS:
            raise InvalidArgumentError(f"there is no tag {tag!r}; there are {', '.join(_TAGS)}", field="tags")
    return [each for tag in tags for each in _TAGS[tag]]


def _how(mode: str) -> PauseHow:
    found = _PAUSES.get(mode)
    if found is None:
        raise InvalidArgumentError(f"mode is {mode!r}; it can be one of {', '.join(_PAUSES)}", field="mode")
    return found
