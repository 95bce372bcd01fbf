"""A server that looks like vLLM to routers and gateways: models, chats and completions, streamed or whole, and metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

_DESTINATION = "x-gateway-destination-endpoint"


class FakeVllm:
    """Listens on a free port of this machine. Answers a word for each token that is asked for.

    Args:
        model: The model that it lists.

    Attributes:
        bodies: Of the requests that it got.
        destinations: The endpoints that a gateway named with each.
        status: Of its answers; another than 200 is an error.
        waiting, running, usage: What its metrics say.
        hold: Answers wait for it.
        metrics: Whether it has any.
    """

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.bodies: list[dict[str, Any]] = []
        self.destinations: list[str] = []
        self.status = 200
        self.waiting = self.running = 0
        self.usage = 0.0
        self.metrics = True
        self.hold = asyncio.Event()
        self.hold.set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        """``ip:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{self.endpoint}"

    async def start(self) -> None:
        """Listens."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Is gone."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [listed]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(status=404)
        lines = (
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {self.running}',
            f'vllm:num_requests_waiting{{engine="0",model_name="{self.model}"}} {self.waiting}.0',
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="{self.model}"}} {self.usage}',
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.destinations.append(request.headers.get(_DESTINATION, ""))
        await self.hold.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        count = body.get("max_tokens", 2)
        picked = {"x-picked": self.destinations[-1]}
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        base = {"id": "x", "object": "text_completion", "created": 1, "model": self.model}
        if not body.get("stream"):
            choice = {"index": 0, "text": "a " * count, "finish_reason": "length", "logprobs": None}
            return web.json_response({**base, "choices": [choice], "usage": usage}, headers=picked)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **picked})
        await response.prepare(request)
        for number in range(count):
            finish = "length" if number == count - 1 else None
            choice = {"index": 0, "text": "a ", "finish_reason": finish, "logprobs": None}
            await response.write(b"data: %b\n\n" % json.dumps({**base, "choices": [choice]}).encode())
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(b"data: %b\n\n" % json.dumps({**base, "choices": [], "usage": usage}).encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
