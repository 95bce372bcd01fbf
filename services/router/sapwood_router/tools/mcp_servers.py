"""MCP servers: which there may be, what tools they have, and calls of these.

A server is named by the operator's file, or by a request where the file allows its host. Each call has a session of its own, with
a timeout, so a server that hangs or ends costs the calls that are under way and nothing else. Lists of tools are kept for some
minutes. A host that a request names may not be at a private address, unless the file says so: its name is looked up once, and the
connection goes to the address that was looked at. Redirects to other hosts are not followed (the mcp package sees to that).
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import yaml

from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_common.public_address import is_public

if TYPE_CHECKING:  # they take a second, also where there are no such servers
    import mcp

logger = logging.getLogger(__name__)

_LIST_SECONDS = 300.0
_MOST_LISTS = 256
_MOST_TOOLS = 128
_MOST_RESULT = 256 * 1024
"""Characters of a result that the model reads."""
_MOST_ANSWER = 4 * 1024 * 1024
"""Bytes of an answer, events included."""
_HOP_HEADERS = frozenset(("host", "content-length", "transfer-encoding", "connection", "content-type", "accept"))


class _Server(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """A server of the file; see docs/agents.md."""

    url: str
    headers: dict[str, str] = {}
    token_env: str = ""
    tenant_token_envs: dict[str, str] = {}
    tools: list[str] | None = None
    require_approval: str = "client"
    timeout: float = 30.0


class _PerRequest(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    hosts: list[str] = []
    private_addresses: bool = False
    timeout: float = 30.0


class _File(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    servers: dict[str, _Server] = {}
    per_request: _PerRequest = msgspec.field(default_factory=_PerRequest)


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server as one request may use it.

    Attributes:
        label: What the request calls it.
        url: Where it is.
        headers: What it is sent, credentials included. Never logged.
        tools: The names of those that may be used; None: all.
        approval: Whether a client must approve calls: ``always`` whatever the request says, ``never`` unless it says so, or as
            the request says (``client``), which is always unless it says otherwise.
        timeout: Seconds for a call.
        guarded: Whether its address must be a public one.
    """

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    tools: frozenset[str] | None = None
    approval: str = "client"
    timeout: float = 30.0
    guarded: bool = True


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server."""

    name: str
    description: str
    input_schema: dict[str, Any]


class McpError(Exception):
    """A server could not be reached, or a call failed; the text is for the model and the client."""


class McpServers:
    """The servers of a file, and those that requests may name.

    Args:
        path: The file; None: there are none.

    Raises:
        ConfigError: It cannot be read, or is wrong.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = _File()
        self._lists: dict[tuple[str, str], tuple[float, list[McpTool]]] = {}
        if path is None:
            return
        try:
            import mcp  # noqa: F401

            self._file = msgspec.convert(yaml.safe_load(path.read_text()) or {}, _File)
        except ImportError:
            raise ConfigError("--mcp needs the package mcp: pip install 'sapwood[mcp]'") from None
        except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise ConfigError(f"--mcp: {path}: {error}") from error
        for label, server in self._file.servers.items():
            if urlsplit(server.url).scheme not in ("http", "https"):
                raise ConfigError(f"--mcp: {path}: servers.{label}.url must be http:// or https://")
            if server.require_approval not in ("always", "never", "client"):
                raise ConfigError(f"--mcp: {path}: servers.{label}.require-approval must be always, never or client")
            for variable in filter(None, (server.token_env, *server.tenant_token_envs.values())):
                if variable not in os.environ:
                    raise ConfigError(f"--mcp: {path}: servers.{label}: there is no variable {variable}")

    @property
    def any(self) -> bool:
        """Whether requests may use any server."""
        return bool(self._file.servers or self._file.per_request.hosts)

    def find(
        self, label: str, url: str | None, headers: Mapping[str, str], authorization: str | None, tenant: str, path: str
    ) -> McpServer:
        """The server that a request means.

        Args:
            label: What it calls it.
            url: Where it says that it is; None: it is one of the file's.
            headers, authorization: What it is to be sent, in addition.
            tenant: Who asks.
            path: The client's name of the tool.

        Raises:
            InvalidArgumentError: There is none, or it may not be used.
        """
        for name in headers:
            if name.lower() in _HOP_HEADERS:
                raise InvalidArgumentError(f"{path}.headers may not have {name[:50]!r}", field=f"{path}.headers")
        sent = {**headers, **({"authorization": f"Bearer {authorization}"} if authorization else {})}
        known = self._file.servers.get(label)
        if url is None:
            if known is None:
                raise InvalidArgumentError(f"there is no MCP server {label[:100]!r} here", field=f"{path}.server_label")
            token = known.tenant_token_envs.get(tenant, known.token_env)
            own = {**known.headers, **({"authorization": f"Bearer {os.environ[token]}"} if token else {})}
            tools = None if known.tools is None else frozenset(known.tools)
            approval, timeout = known.require_approval, known.timeout
            return McpServer(label, known.url, {**own, **sent}, tools, approval, timeout, guarded=False)
        parts = urlsplit(url)
        allowed, rule = self._file.per_request.hosts, f"{path}.server_url"
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidArgumentError("server_url must be http:// or https:// with a host", field=rule)
        if not any(fnmatch.fnmatchcase(parts.hostname.lower(), pattern.lower()) for pattern in allowed):
            raise InvalidArgumentError(f"MCP servers at {parts.hostname[:100]!r} are not allowed here", field=rule)
        per_request = self._file.per_request
        return McpServer(label, url, sent, timeout=per_request.timeout, guarded=not per_request.private_addresses)

    async def list_tools(self, server: McpServer) -> list[McpTool]:
        """The tools of a server that may be used.

        Raises:
            McpError: It does not tell.
        """
        key = server.url, repr(sorted(server.headers.items()))
        kept = self._lists.get(key)
        if kept is None or kept[0] < time.monotonic():
            found: list[McpTool] = []
            async with _session(server) as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += [McpTool(each.name, each.description or "", each.input_schema) for each in page.tools]
                    cursor = page.next_cursor
                    if not cursor or len(found) > _MOST_TOOLS:
                        break
            if len(self._lists) >= _MOST_LISTS:
                self._lists.pop(next(iter(self._lists)))
            kept = self._lists[key] = time.monotonic() + _LIST_SECONDS, found[:_MOST_TOOLS]
        return [tool for tool in kept[1] if server.tools is None or tool.name in server.tools]

    async def call(self, server: McpServer, name: str, arguments: str, *, tenant: str, request_id: str) -> str:
        """Calls a tool. One line of the log tells of it, without arguments and result.

        Args:
            server: Whose.
            name: Which.
            arguments: A JSON object.
            tenant, request_id: For the log.

        Raises:
            McpError: It failed; the text says how.
        """
        started, outcome = time.perf_counter(), "failed"
        try:
            given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
            async with _session(server) as client:
                result = await client.call_tool(name, given)
            text = _text_of(result)
            if result.is_error:
                raise McpError(text)
            outcome = "done"
            return text
        except msgspec.DecodeError as error:
            raise McpError(f"the arguments are no JSON object: {error}") from error
        finally:
            taken = (time.perf_counter() - started) * 1000
            logger.info(
                "mcp request=%s tenant=%s server=%s tool=%s outcome=%s duration=%.0fms",
                request_id, tenant or "-", server.label, name, outcome, taken,
            )  # fmt: skip


@asynccontextmanager
async def _session(server: McpServer) -> AsyncIterator[mcp.Client]:
    """A session with a server.

    Raises:
        McpError: It cannot be reached, or takes too long.
    """
    import httpx2
    import mcp
    from mcp.client.streamable_http import streamable_http_client

    transport: httpx2.AsyncBaseTransport = httpx2.AsyncHTTPTransport()
    if server.guarded:
        transport = _public_only(transport)
    transport = _bounded(transport)
    try:
        async with (
            asyncio.timeout(server.timeout),
            httpx2.AsyncClient(
                headers=dict(server.headers), timeout=server.timeout, transport=transport, trust_env=False
            ) as http,
            mcp.Client(streamable_http_client(server.url, http_client=http), mode="legacy") as client,
        ):
            yield client
    except McpError:
        raise
    except TimeoutError:
        raise McpError(f"the server took more than {server.timeout:g} s") from None
    except Exception as error:
        raise McpError(f"{server.label}: {_innermost(error)}") from error


def _innermost(error: BaseException) -> str:
    """What a failure says, out of the groups that it comes in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error)[:300]}"


def _public_only(inner: Any) -> Any:
    """A transport that connects to public addresses alone, each looked up once."""
    import httpx2

    class PublicOnly(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            host = request.url.host
            address = await public_address(host, request.url.port or (443 if request.url.scheme == "https" else 80))
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = request.url.copy_with(host=address)
            response: httpx2.Response = await inner.handle_async_request(request)
            return response

        async def aclose(self) -> None:
            await inner.aclose()

    return PublicOnly()


def _bounded(inner: Any) -> Any:
    """A transport that ends answers that are longer than any needs to be: a server may send without end. Nothing is compressed,
    since a small answer could then become a large one."""
    import httpx2

    class Part(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self._stream:
                size += len(piece)
                if size > _MOST_ANSWER:
                    raise httpx2.ReadError(f"the answer has more than {_MOST_ANSWER} bytes")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Bounded(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            request.headers["accept-encoding"] = "identity"
            response: httpx2.Response = await inner.handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                raise httpx2.ReadError("the answer is compressed, though it was asked not to be")
            response.stream = Part(response.stream)
            return response

        async def aclose(self) -> None:
            await inner.aclose()

    return Bounded()


async def public_address(host: str, port: int) -> str:
    """The address behind a name, if all that are behind it are public.

    Raises:
        McpError: One is not, or there is none.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise McpError(f"{host} is not known: {error}") from error
    addresses = [str(address[0]) for *_, address in found]
    for address in addresses:
        if not is_public(address):
            raise McpError(f"{host} is at a private address")
    return addresses[0]


def _text_of(result: mcp.types.CallToolResult) -> str:
    """A result as the model reads it: its texts, or its structure."""
    texts = [part.text for part in result.content if part.type == "text"]
    others = sum(part.type != "text" for part in result.content)
    text = "\n".join(texts)
    if not text and result.structured_content is not None:
        text = msgspec.json.encode(result.structured_content).decode()
    if others and not text:
        text = f"({others} parts that are no text)"
    return text if len(text) <= _MOST_RESULT else text[:_MOST_RESULT] + "\n(cut)"
