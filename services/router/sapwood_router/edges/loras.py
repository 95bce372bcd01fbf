"""Loading and unloading adapters (LoRA) over HTTP, as vLLM and SGLang have it. Only where clients may do what operators do."""

from __future__ import annotations

import msgspec

from sapwood_common.errors import InvalidArgumentError
from sapwood_router.edges.http.exchange import Exchange
from sapwood_router.edges.http.json_body import Neutral, convert, decode_object
from sapwood_router.edges.routes import Post, Route
from sapwood_router.flow.adapters import Adapters
from sapwood_router.flow.generation import Pipeline

_NEUTRAL: Neutral = {"is_3d_lora_weight": (False,), "load_format": ("auto",)}
_IGNORED = frozenset({"load_inplace", "lora_id", "lora_int_id", "added_tokens_config"})
"""Whether a name may be loaded again (it may), and numbers that are chosen here."""


class LoadLoraRequest(msgspec.Struct):
    """``POST /v1/load_lora_adapter`` and ``/load_lora_adapter``; ``model`` is an extension."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None
    model: str | None = None


class UnloadLoraRequest(msgspec.Struct):
    """``POST /v1/unload_lora_adapter`` and ``/unload_lora_adapter``; ``abort_requests`` is an extension."""

    lora_name: str
    abort_requests: bool | None = None


class LorasApi:
    """The paths.

    Args:
        adapters: Loads and unloads them.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Post("/v1/load_lora_adapter", self.load, summary="Loads an adapter, vLLM's way", takes=(LoadLoraRequest,)),
            Post(
                "/v1/unload_lora_adapter",
                self.unload,
                summary="Unloads an adapter, vLLM's way",
                takes=(UnloadLoraRequest,),
            ),
            Post(
                "/load_lora_adapter",
                self.load_as_sglang,
                summary="Loads an adapter, SGLang's way",
                takes=(LoadLoraRequest,),
            ),
            Post(
                "/unload_lora_adapter",
                self.unload_as_sglang,
                summary="Unloads an adapter, SGLang's way",
                takes=(UnloadLoraRequest,),
            ),
        ]

    async def load(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Loads an adapter. Raises as :meth:`Adapters.load`."""
        name = await self._load(exchange, body)
        await exchange.send_page(200, _TEXT, f"Success: LoRA adapter '{name}' added successfully.".encode())

    async def unload(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Unloads an adapter. Raises as :meth:`Adapters.unload`."""
        name = await self._unload(exchange, body)
        await exchange.send_page(200, _TEXT, f"Success: LoRA adapter '{name}' removed successfully.".encode())

    async def load_as_sglang(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Loads an adapter; answers all that there are, by name."""
        await self._load(exchange, body)
        await self._show(exchange, pipeline)

    async def unload_as_sglang(self, exchange: Exchange, body: bytes, pipeline: Pipeline, deadline: float) -> None:
        """Unloads an adapter; answers all that are left, by name."""
        await self._unload(exchange, body)
        await self._show(exchange, pipeline)

    async def _load(self, exchange: Exchange, body: bytes) -> str:
        given = decode_object(body)
        request = convert(given, LoadLoraRequest, _NEUTRAL, _IGNORED, left_out=exchange.left_out)
        if not request.lora_path:
            raise InvalidArgumentError("it is empty", field="lora_path")
        try:
            await self._adapters.load(
                request.lora_name, request.lora_path, request.model, pinned=request.pinned is True
            )
        except InvalidArgumentError as error:
            if error.field in _FIELDS:
                raise InvalidArgumentError(error.message, field=_FIELDS[error.field]) from error
            raise
        return request.lora_name

    async def _unload(self, exchange: Exchange, body: bytes) -> str:
        request = convert(decode_object(body), UnloadLoraRequest, {}, _IGNORED, left_out=exchange.left_out)
        await self._adapters.unload(request.lora_name, abort=request.abort_requests is True)
        return request.lora_name

    async def _show(self, exchange: Exchange, pipeline: Pipeline) -> None:
        names = {each.name: each.path for each in self._adapters.list()}
        await exchange.send_body(200, msgspec.json.encode({"success": True, "loaded_adapters": names}))


_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_FIELDS = {"name": "lora_name", "path": "lora_path"}
