"""Servers with OpenAI's API: ``/v1/completions`` and ``/v1/chat/completions``, streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sapwood.bench.data.conversation import Api, Ask
from sapwood.bench.targets.record import NOTHING, Record, clock
from sapwood.bench.targets.target import Sampling, TargetError

_PATHS: dict[Api, str] = {"chat": "/chat/completions", "completions": "/completions"}
"""The longer one first: it ends like the other."""
_MOST_EVENT_BYTES = 64 * 1024 * 1024
_MOST_ERROR_BYTES = 64 * 1024
_CONNECT_SECONDS = 30.0
_END_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 3.0
"""An idle connection is used again within this time; uvicorn closes those that are idle for five seconds."""


def parse_url(url: str) -> tuple[str, Api | None]:
    """The base of a server's API (``http://host:8000/v1``), and the API if the URL names one. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r}: the URL of an API has neither ? nor #")
    path = parts.path.rstrip("/")
    for api, ending in _PATHS.items():
        if path.endswith(ending):
            return f"{parts.scheme}://{parts.netloc}{path.removesuffix(ending)}", api
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}", None


class OpenAITarget:
    """Implements :class:`~sapwood.bench.targets.target.Target`. As many connections as there are requests at a time.

    Args:
        base: Such as ``http://127.0.0.1:8000/v1``.
        api: Which path is asked.
        sampling: How all requests are sampled.
        model: None takes the first that the server lists.
        api_key: Sent as ``Authorization: Bearer``.
        ca: PEM file of the authority that signed the server's certificate; the system's are taken if it is None.
        timeout: Seconds that a request may take.
    """

    def __init__(
        self,
        base: str,
        api: Api,
        sampling: Sampling,
        *,
        model: str | None,
        api_key: str | None,
        ca: Path | None,
        timeout: float,
    ) -> None:
        self._base = base
        self._url = base + _PATHS[api]
        self._api = api
        self._model = model
        self._timeout = timeout
        self._common: dict[str, Any] = {
            "temperature": sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if sampling.ignore_eos else {}),
        }
        self._extra = sampling.extra or {}
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=context, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS),
        )

    async def connect(self) -> str:
        if self._model is None:
            try:
                found = await self._get("/models")
                self._model = str(found["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise TargetError(f"{self._base}/models lists no model; name one with --model") from None
        return self._model

    async def _get(self, path: str) -> Any:
        """The JSON that the server answers to a GET. Raises TargetError."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS), self._session.get(self._base + path) as response:
                body = await response.content.read(_MOST_EVENT_BYTES)
                if response.status != 200:
                    message = f"{self._base}{path}: HTTP {response.status}: {_error_message(body)}"
                    raise TargetError(f"{message}; name the model with --model" if response.status == 404 else message)
                return json.loads(body)
        except TimeoutError:
            raise TargetError(f"no server answers at {self._base} within {_CONNECT_SECONDS:.0f} s") from None
        except aiohttp.ClientConnectorError as error:
            why = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else error.strerror or str(error)
            raise TargetError(f"no server answers at {self._base}: {why}; `sapwood up` starts one here") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TargetError(f"{self._base}{path}: {str(error) or type(error).__name__}") from None
        except ValueError:
            raise TargetError(f"{self._base}{path} answers with something else than JSON") from None

    async def ask(self, ask: Ask, record: Record) -> None:
        raw = json.dumps(self._body(ask)).encode()
        async with _noting(record, self._timeout), self._session.post(self._url, data=raw) as response:
            if response.status != 200:
                record.fail(f"HTTP {response.status}", _error_message(await response.content.read(_MOST_ERROR_BYTES)))
            else:
                await self._read(response.content, record)

    async def score(self, text: str, record: Record) -> list[float]:
        if self._api == "chat":
            record.sent = record.ended = clock()
            record.fail("not served", "texts are scored by --api completions only")
            return []
        # A token is generated: not every server does with none.
        asked = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        raw = json.dumps({"model": self._model, **asked}).encode()
        async with _noting(record, self._timeout), self._session.post(self._url, data=raw) as response:
            answer = await response.read()
            if response.status != 200:
                record.fail(f"HTTP {response.status}", _error_message(answer))
            else:
                try:
                    found = json.loads(answer)
                    record.prompt_tokens = found["usage"]["prompt_tokens"]
                    return [
                        float(each)
                        for each in found["choices"][0]["logprobs"]["token_logprobs"][1 : record.prompt_tokens]
                    ]
                except (ValueError, LookupError, TypeError):
                    record.fail("no probabilities", answer[:200].decode(errors="replace"))
        return []

    async def close(self) -> None:
        await self._session.close()

    def _body(self, ask: Ask) -> dict[str, Any]:
        prompt = ask.prompt
        if self._api == "chat":
            prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {"model": self._model, "messages" if self._api == "chat" else "prompt": prompt, **self._common}
        if ask.max_tokens is not None:
            body["max_tokens"] = ask.max_tokens
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.json_schema:
            schema = {"name": "answer", "schema": json.loads(ask.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **self._extra}

    async def _read(self, content: aiohttp.StreamReader, record: Record) -> None:
        """Reads server-sent events until ``[DONE]``."""
        rest = b""
        async for data in content.iter_any():
            now = clock()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue  # an empty line between events, or a comment that keeps the connection open
                event = line[5:].strip()
                if event == b"[DONE]":
                    record.ended = now
                    if not record.arrivals and record.completion_tokens is None:
                        record.fail(NOTHING)
                    await _read_to_end(content)
                    return
                self._take(event, now, record)
            if len(rest) > _MOST_EVENT_BYTES:
                record.fail("endless event", f"over {_MOST_EVENT_BYTES} bytes without an end of line")
            if record.error:
                return
        record.fail("cut off", f"the stream ended without [DONE], after {len(record.arrivals)} pieces")

    def _take(self, event: bytes, now: float, record: Record) -> None:
        try:
            found = json.loads(event)
            error = found.get("error")
            if error is not None:
                record.fail(
                    "error in the stream", str(error.get("message", error) if isinstance(error, dict) else error)
                )
                return
            choices = found.get("choices") or ()
            usage = found.get("usage")
            for choice in choices:
                text, is_piece = _text_of(choice)
                if is_piece:
                    record.arrivals.append(now)
                    record.pieces.append(text)
                record.finish_reason = choice.get("finish_reason") or record.finish_reason
            if usage is not None:
                record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (ValueError, KeyError, AttributeError, TypeError):
            record.fail("malformed event", event[:200].decode(errors="replace"))


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Reads what follows the last event, so that the connection can be used again; a server that is slow with it loses it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            async for _ in content.iter_any():
                pass


def _text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """The visible text of a chunk, and whether the chunk brought any of the answer: text, reasoning or calls of tools."""
    delta = choice.get("delta")
    if delta is None:
        text = choice["text"]
        return text, bool(text)
    text = delta.get("content") or ""
    other = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    return text, bool(text or other)


@asynccontextmanager
async def _noting(record: Record, seconds: float) -> AsyncIterator[None]:
    """Notes when a request was sent and when it ended, and failures of its connection, which do not leave the block."""
    record.sent = clock()
    try:
        async with asyncio.timeout(seconds):
            yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        record.fail("no connection", str(error))
    except TimeoutError:
        record.fail("timeout")
    except (aiohttp.ClientError, OSError) as error:
        record.fail("connection broke", str(error) or type(error).__name__)
    finally:
        record.ended = record.ended or clock()


def _error_message(body: bytes) -> str:
    """What an error's body says."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")
