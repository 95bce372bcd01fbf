"""Asks a backend: which models it has, for an answer in one piece, for one as events."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from sapwood_common.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SapwoodError,
    UnavailableError,
)
from sapwood_router.transport.backend.spec import BackendSpec

_CONNECT_SECONDS = 5.0
_MOST_BYTES = 16 * 1024 * 1024
"""The most bytes of an answer in one piece."""
_MOST_EVENT_BYTES = 4 * 1024 * 1024
_MOST_METRICS_BYTES = 1024 * 1024
_MOST_ERROR_BYTES = 64 * 1024
_DONE = b"[DONE]"


class HttpClient:
    """The connections to all backends, made when the first is asked. Close it in the end."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """aiohttp's: it keeps connections open, follows no redirect by default, takes no cookies and unpacks nothing."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"accept-encoding": "identity", "user-agent": "sapwood-router"},
            )
        return self._session

    async def close(self) -> None:
        """Closes them."""
        if self._session is not None:
            await self._session.close()


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as ``/v1/models`` lists it; ``context_length`` is 0 where that is not said."""

    id: str
    owner: str
    context_length: int


class Backend:
    """One backend.

    Args:
        spec: Which.
        http: Connects.
        silence: Seconds that a stream may say nothing.

    Attributes:
        spec: The argument.
        owner: Who the server says has made its models: "vllm", "sapwood", ...; "" while that is not known.
        model: What it calls the model; "" while that is not known.
        gone: Set while it is taken for lost: requests that it has not begun to answer are given up.
    """

    def __init__(self, spec: BackendSpec, http: HttpClient, silence: float) -> None:
        self.spec = spec
        self.owner = ""
        self.model = spec.model
        self.gone = asyncio.Event()
        self._http = http
        self._silence = silence

    async def models(self, seconds: float) -> list[ListedModel]:
        """The models that it lists.

        Args:
            seconds: To wait.

        Raises:
            SapwoodError: It does not answer that.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._answer("GET", "/models", None, "", timeout) as response:
            found = await self._json(response)
        listed = found.get("data")
        if not isinstance(listed, list):
            raise InternalError(f"backend {self.spec.address} lists no models")
        return [
            ListedModel(item["id"], _text(item.get("owned_by")), _count(item.get("max_model_len")))
            for item in listed
            if isinstance(item, dict) and isinstance(item.get("id"), str)
        ]

    async def metrics(self, seconds: float) -> bytes:
        """Its page of metrics in Prometheus' format.

        Args:
            seconds: To wait.

        Raises:
            SapwoodError: It has none.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._answer("GET", "/metrics", None, "", timeout, self.spec.root) as response:
            try:
                return await _read(response, _MOST_METRICS_BYTES)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._broke(error) from None

    async def whole(self, path: str, body: bytes, request_id: str) -> dict[str, Any]:
        """An answer in one piece: an object that has ``choices``.

        Raises:
            SapwoodError: It failed or refused, or answered something else.
        """
        async with self._answer("POST", path, body, request_id, _patient()) as response:
            found = await self._json(response)
        return self._checked(found)

    async def events(self, path: str, body: bytes, request_id: str) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of an answer as they come, without the mark of their end; each has ``choices``.

        Raises:
            SapwoodError: As for :meth:`whole`; UnavailableError also where it falls silent, or breaks off without a mark.
        """
        async with self._answer("POST", path, body, request_id, _patient(self._silence)) as response:
            if response.content_type != "text/event-stream":
                raise InternalError(f"backend {self.spec.address} answered {response.content_type}, not events")
            try:
                async for data in event_data(response.content.iter_any(), _MOST_EVENT_BYTES):
                    if data == _DONE:
                        return
                    yield self._chunk(data)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise self._broke(error) from None
        raise UnavailableError(f"backend {self.spec.address} broke off")

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InternalError(f"backend {self.spec.address} sent an event that is no JSON") from None
        if isinstance(found, dict) and found.get("error"):
            raise error_of_event(self.spec.address, found["error"])
        return self._checked(found)

    def _checked(self, found: Any) -> dict[str, Any]:
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise InternalError(f"backend {self.spec.address} answered what is no answer of OpenAI's API")
        answer: dict[str, Any] = found
        return answer

    async def _json(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(await _read(response, _MOST_BYTES))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InternalError(f"backend {self.spec.address} answered no JSON") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broke(error) from None
        if not isinstance(found, dict):
            raise InternalError(f"backend {self.spec.address} answered no JSON object")
        return found

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: bytes | None,
        request_id: str,
        timeout: aiohttp.ClientTimeout,
        base: str | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose status is 200."""
        headers = {"content-type": "application/json"} if body is not None else {}
        if self.spec.authorization:
            headers["authorization"] = self.spec.authorization
        if request_id:
            headers["x-request-id"] = request_id
        asking = self._http.session.request(
            method, (base or self.spec.base) + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        )
        try:
            response = await (self._unless_gone(asking) if body is not None else asking)
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError, ValueError) as error:
            raise self._broke(error) from None
        async with response:
            if response.status != 200:
                try:
                    content = await _read(response, _MOST_ERROR_BYTES)
                except (aiohttp.ClientError, TimeoutError, OSError, SapwoodError):
                    content = b""
                raise error_of_answer(self.spec.address, response.status, content, response.headers)
            coding = response.headers.get("content-encoding", "identity")
            if coding != "identity":  # unpacked, a few bytes can be gigabytes
                raise InternalError(f"backend {self.spec.address} answered in {coding[:20]}, which was not asked for")
            yield response

    async def _unless_gone(self, asking: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
        """Waits for the beginning of an answer, unless the backend is taken for lost meanwhile.

        Raises:
            UnavailableError: It is.
        """
        answer, gone = asyncio.ensure_future(asking), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise UnavailableError(f"backend {self.spec.address} does not answer")
            return answer.result()
        except BaseException:
            if not answer.cancel() and not answer.cancelled() and answer.exception() is None:
                answer.result().close()  # it came just as the client left
            raise
        finally:
            gone.cancel()

    def _broke(self, error: Exception) -> UnavailableError:
        if isinstance(error, TimeoutError):
            said = "it fell silent"
        elif isinstance(error, aiohttp.ClientConnectorError):
            said = f"no connection ({error.os_error.strerror or error.os_error})"
        else:
            said = str(error) or type(error).__name__
        return UnavailableError(f"backend {self.spec.address}: {said}", retry_after=1.0)


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises InternalError: it is longer than ``most`` bytes."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > most:
            raise InternalError(f"the backend's answer is longer than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _patient(silence: float | None = None) -> aiohttp.ClientTimeout:
    """The whole is bounded by the request's own deadline."""
    return aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# Server-sent events out of the bytes of a backend's answer.
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_END = 4


async def event_data(pieces: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    """The data of each event; what has none, such as a comment, is left out, and so is one that the end cuts off.

    Args:
        pieces: The answer's bytes.
        most: Bytes of the longest event.

    Raises:
        InternalError: One is longer.
    """
    rest = bytearray()
    async for piece in pieces:
        seen = max(0, len(rest) - _LONGEST_END + 1)  # what came before has no end in it: it is not searched again
        rest += piece
        while (end := _END.search(rest, seen)) is not None:
            event, seen = bytes(rest[: end.start()]), 0
            del rest[: end.end()]
            lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(rest) > most:
            raise InternalError(f"the backend sent an event of more than {most} bytes")


_LONGEST = 1000
"""Characters of a backend's message that clients see."""
_MOST_RETRY_AFTER = 600.0
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "not_found_error": 404,
    "NotFoundError": 404,
    "rate_limit_error": 429,
    "insufficient_quota": 429,
    "service_unavailable_error": 503,
    "overloaded_error": 503,
    "timeout_error": 503,
}


def error_of_answer(address: str, status: int, body: bytes, headers: Mapping[str, str]) -> SapwoodError:
    """The error that an answer stands for whose status is not 200.

    An error of the client's keeps the backend's words; another one names the backend. That the backend does not take
    the router's key is no fault of the client's.
    """
    message, field = _said(body)
    retry_after = _retry_after(headers)
    if status == 429:
        return ResourceExhaustedError(f"backend {address}: {message or 'busy'}", retry_after=retry_after or 1.0)
    if status in (400, 413, 415, 422):
        return InvalidArgumentError(message or f"the backend refuses the request ({status})", field=field)
    if status == 404:
        return NotFoundError(message or "the backend knows no such model or path", field=field)
    what = f"backend {address} answered {status}{': ' if message else ''}{message}"
    return InternalError(what) if status == 500 else UnavailableError(what, retry_after=retry_after or 1.0)


def error_of_event(address: str, detail: Any) -> SapwoodError:
    """The error that an event with ``error`` stands for."""
    status = 500
    if isinstance(detail, dict):
        kind, code = detail.get("type"), detail.get("code")
        if isinstance(code, int) and 400 <= code <= 599:
            status = code
        elif isinstance(kind, str):
            status = _STATUS_OF_TYPE.get(kind, 500)
    return error_of_answer(address, status, msgspec.json.encode({"error": detail}), {})


def _said(body: bytes) -> tuple[str, str | None]:
    """Message and parameter of an error's body, as OpenAI, vLLM and FastAPI write it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", None
    if not isinstance(found, dict):
        return "", None
    error = found.get("error", found)
    if not isinstance(error, dict):
        return str(error)[:_LONGEST], None
    message, field = error.get("message", found.get("detail", "")), error.get("param")
    return str(message)[:_LONGEST], field if isinstance(field, str) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:  # absent, or a date
            continue
        if 0 < seconds < _MOST_RETRY_AFTER:
            return seconds
    return None
