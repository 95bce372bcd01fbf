"""Renders conversations in processes that are killed at a deadline (``child_pool``), one way for all templates.

A chat template is a program that came with a model: a filter of a large number, an equality of nested lists, or a power freezes
the process that renders it, and no check inside of it helps. Its time and its memory are bounded from outside. A rendering that
takes long gives way to others after a slice. A round trip costs 0.1 to 0.2 ms more than rendering in this process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os

from sapwood.v1 import tokenizer_pb2
from sapwood_common.child_pool import ChildDiedError, ChildPool, PoolLimits, TimeUpError
from sapwood_common.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from sapwood_tokenizer.serve.render_process import LATE_SYSTEM, PROBE, PROMPTED
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 4
_MOST_PAUSED = 16
_SLICE_SECONDS = 0.05
_MEMORY_BYTES = 512 * 1024 * 1024
_PROBE_SECONDS = 5.0
_GRACE = 0.25
"""Seconds that a rendering may continue after its caller has left: mostly it ends, and its process is used again."""
_TOO_MANY = "too many conversations take long to render"


class Renderer:
    """Renders one model's chat template. Lives on one event loop. Made by :func:`start_renderer`.

    Args:
        pool: Its processes.
        timeout: Seconds that a rendering may take.

    Attributes:
        shows_tools: Whether the template reads ``tools``.
        variables: What requests may set in the template to an effect.
    """

    def __init__(self, pool: ChildPool, timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._form = LATE_SYSTEM
        self._abandoned: set[asyncio.Task[bytes]] = set()
        self.shows_tools = False
        self.variables: list[str] = []

    async def start(self, origin: str) -> None:
        """Starts a process and learns about the template.

        Raises:
            ConfigError: The template cannot be compiled; the message has its origin.
        """
        try:
            greeting = json.loads(await self._pool.start())
        except (ChildDiedError, TimeoutError):
            raise ConfigError(
                f"{origin}: the chat template cannot be compiled: it takes too much time or memory"
            ) from None
        if "error" in greeting:
            raise ConfigError(greeting["error"])
        self.shows_tools, self.variables = greeting["shows_tools"], greeting["variables"]
        try:
            answer = await self._pool.ask(bytes([PROBE]), timeout=_PROBE_SECONDS)
            self._form = answer[1]
        except (ChildDiedError, TimeUpError):
            logger.warning("%s: the chat template does not render a short conversation in %g s", origin, _PROBE_SECONDS)

    async def render(self, request: tokenizer_pb2.ApplyChatTemplateRequest, *, prompted: bool) -> str:
        """The conversation as one text.

        Args:
            request: The request; its salt names the caller.
            prompted: Whether the text ends with the opening of the assistant's turn.

        Raises:
            InvalidArgumentError: The template refuses the messages, takes too much time or memory, or a field is wrong.
            ResourceExhaustedError: Too many renderings take long.
        """
        question = bytes([self._form | prompted * PROMPTED]) + request.SerializeToString()
        asked = asyncio.ensure_future(self._pool.ask(question, request.cache_salt, self._timeout))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._abandon(asked)
            raise
        except TimeUpError as error:
            if error.ran < error.waited:
                raise ResourceExhaustedError(_TOO_MANY, retry_after=1.0) from None
            raise InvalidArgumentError(
                f"the chat template was stopped: it did not end within {self._timeout:.3g} s", field="messages"
            ) from None
        except ChildDiedError:
            raise InvalidArgumentError(
                "the chat template was stopped: it needs too much memory", field="messages"
            ) from None
        if answer.startswith(b"+"):
            return answer[1:].decode()
        message, field = json.loads(answer[1:])
        raise InvalidArgumentError(message, field=field)

    async def close(self) -> None:
        """Ends all renderings."""
        await self._pool.close()

    def _abandon(self, asked: asyncio.Task[bytes]) -> None:
        self._abandoned.add(asked)
        timer = asyncio.get_running_loop().call_later(_GRACE, asked.cancel)

        def over(task: asyncio.Task[bytes]) -> None:
            timer.cancel()
            self._abandoned.discard(task)
            if not task.cancelled():
                task.exception()  # nobody waits for it

        asked.add_done_callback(over)


async def start_renderer(loaded: LoadedTokenizer, timeout: float) -> Renderer | None:
    """The renderer of a model's template; None if it has none.

    Args:
        loaded: The model.
        timeout: Seconds that a rendering may take.

    Raises:
        ConfigError: The template cannot be compiled; the message names its file.
    """
    if loaded.chat_template is None:
        return None
    settings = {
        "template": loaded.chat_template,
        "special_tokens": loaded.special_tokens,
        "origin": loaded.template_origin,
    }
    limits = PoolLimits(
        size=min(_MOST_PROCESSES, max(2, os.cpu_count() or 1)),
        most_paused=_MOST_PAUSED,
        max_queued=4096,
        slice_seconds=_SLICE_SECONDS,
        memory_bytes=_MEMORY_BYTES,
        cpu_seconds=int(timeout) + 1,
    )
    pool = ChildPool("sapwood_tokenizer.serve.render_process", json.dumps(settings).encode(), limits, _TOO_MANY)
    renderer = Renderer(pool, timeout)
    try:
        await renderer.start(loaded.template_origin)
    except BaseException:
        await renderer.close()
        raise
    return renderer
