"""Answers with tools of MCP servers: the model calls, the router asks the server, and the model goes on, until it has answered.

Each round is a request of its own; the prefix cache has what the rounds before read. A round ends the loop if the model called no
tool of a server, or a function of the client's, or a tool that the client has to approve first. Bound: so many calls a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sapwood_common.errors import InvalidArgumentError, NotFoundError
from sapwood_router.edges.responses.items import ItemMaker
from sapwood_router.edges.responses.types import Item, ResponsesRequest, Tool
from sapwood_router.edges.sending import collect
from sapwood_router.flow.generation import Pipeline
from sapwood_router.request.context import Finish, FinishReason, RequestContext, ToolCall, Turn, Usage
from sapwood_router.request.output import Output, ToolCallDelta
from sapwood_router.tools.mcp_servers import McpError, McpServer, McpServers

MCP = "mcp"
_BETWEEN = ":"
"""Stands between a server's label and a tool's name, in the name that the model sees."""
_MOST_CALLS = 32
_DENIED = "The user did not approve this call."
TellItem = Callable[[int, dict[str, Any]], Awaitable[None]]
"""Called with each item of the answer and its index, as it is done."""


@dataclass(frozen=True, slots=True)
class _Offered:
    """A tool of a server that the model may call."""

    server: McpServer
    name: str
    needs_approval: bool


class ToolLoop:
    """The loop of one request.

    Args:
        request: The request.
        servers: The servers.
        tenant: Who asks.
        request_id: For the log.
        items: Makes the answer's items.
        tell: Told of each.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        servers: McpServers,
        tenant: str,
        request_id: str,
        items: ItemMaker,
        tell: TellItem,
    ) -> None:
        self._request = request
        self._servers = servers
        self._tenant = tenant
        self._request_id = request_id
        self._items = items
        self._tell = tell
        self._offered: dict[str, _Offered] = {}
        self._left = _MOST_CALLS if request.max_tool_calls is None else min(request.max_tool_calls, _MOST_CALLS)
        self.turns: list[Turn] = []
        """What the rounds said, and what the tools answered: the conversation goes on with them."""
        self.made: list[dict[str, Any]] = []
        """The items so far."""
        self._prompt = self._completion = self._cached = self._written = self._reasoning = 0

    async def offer(self, shown: frozenset[str]) -> list[Tool]:
        """Asks the servers for their tools. Returns all that the model is shown, the client's functions first.

        Args:
            shown: The labels of servers whose tools the conversation has listed already.

        Raises:
            InvalidArgumentError: The request names no server that may be used, or a server does not answer.
        """
        tools: list[Tool] = []
        for index, tool in enumerate(self._request.tools or ()):
            if tool.type != MCP:
                tools.append(tool)
                continue
            path = f"tools[{index}]"
            if not tool.server_label:
                raise InvalidArgumentError("server_label is required", field=f"{path}.server_label")
            server = self._servers.find(
                tool.server_label, tool.server_url, tool.headers or {}, tool.authorization, self._tenant, path
            )
            try:
                found = await self._servers.list_tools(server)
            except McpError as error:
                raise InvalidArgumentError(f"its tools are not known: {error}", field=path) from error
            allowed = _names(tool.allowed_tools, f"{path}.allowed_tools")
            found = [each for each in found if allowed is None or each.name in allowed]
            for each in found:
                name = f"{server.label}{_BETWEEN}{each.name}"
                asks = _needs_approval(tool.require_approval, each.name, server.approval, f"{path}.require_approval")
                self._offered[name] = _Offered(server, each.name, asks)
                described = each.description or tool.server_description
                tools.append(Tool("function", name, described, each.input_schema))
            if server.label not in shown:
                listed = [
                    {"name": each.name, "description": each.description, "input_schema": each.input_schema}
                    for each in found
                ]
                await self._add("mcpl", "mcp_list_tools", server_label=server.label, tools=listed, error=None)
        return tools

    async def answer_approvals(self, given: Sequence[Item], known: Mapping[str, Item]) -> None:
        """Makes the calls that the input approves.

        Args:
            given: The input's items.
            known: The items in which approval was asked for, by id.

        Raises:
            NotFoundError: Nobody asked for it.
        """
        for index, item in enumerate(given):
            if item.type != "mcp_approval_response":
                continue
            asked = known.get(item.approval_request_id or "")
            field = f"input[{index}].approval_request_id"
            if asked is None or asked.type != "mcp_approval_request":
                raise NotFoundError("approval was not asked for", field=field)
            arguments = asked.arguments if isinstance(asked.arguments, str) else "{}"
            name = f"{asked.server_label}{_BETWEEN}{asked.name}"
            call = ToolCallDelta(0, asked.id or "", name, arguments)
            if item.approve:
                await self._call(call, asked.id)
            else:
                self._note(call, f"{_DENIED} {item.reason or ''}".strip())

    async def run(
        self, make: Callable[[Sequence[Turn], bool], RequestContext], pipeline: Pipeline
    ) -> tuple[Finish, RequestContext]:
        """Runs rounds until there is an answer.

        Args:
            make: Makes the request of a round from the turns before it; the second argument says whether it is the first.
            pipeline: Runs them.

        Returns:
            How the last round ended, with the usage of all, and its request.

        Raises:
            SapwoodError: A round failed.
        """
        first = True
        while True:
            context = make(self.turns, first)
            runs = await pipeline.open_all([context])
            try:
                (whole,) = await collect(runs)
            finally:
                pipeline.close_all(runs)
            finish, output = whole.finish, whole.output
            assert finish is not None, "a run ends with a finish or an error"
            goes_on = await self._take(output, finish)
            usage = self._count(finish.usage)
            if not goes_on or finish.reason is not FinishReason.STOP:
                return Finish(finish.reason, usage, finish.stop_match, finish.stop_token), context
            first = False

    async def _take(self, output: Output, finish: Finish) -> bool:
        """Takes what a round said; says whether another one is to follow."""
        status = "completed" if finish.reason is FinishReason.STOP else "incomplete"
        if output.reasoning:
            await self._put(self._items.reasoning(len(self.made), output.reasoning, status))
        if output.text or not (output.tool_calls or output.reasoning):
            await self._put(self._items.message(len(self.made), output.text, status))
        if output.text or output.reasoning:
            self.turns.append(Turn("assistant", output.text or None, reasoning=output.reasoning or None))
        goes_on = bool(output.tool_calls)
        for call in output.tool_calls:
            offered = self._offered.get(call.name)
            if offered is None:
                await self._put(self._items.call(len(self.made), call.id, call.name, call.arguments, status))
                self.turns.append(Turn("assistant", None, tool_calls=(ToolCall(call.id, call.name, call.arguments),)))
                goes_on = False
            elif offered.needs_approval:
                named = {"name": offered.name, "arguments": call.arguments, "server_label": offered.server.label}
                await self._add("mcpr", "mcp_approval_request", **named)
                goes_on = False
            elif finish.reason is FinishReason.STOP:
                await self._call(call, None)
        return goes_on

    async def _call(self, call: ToolCallDelta, approval: str | None) -> None:
        offered = self._offered.get(call.name)
        output: str | None = None
        error: str | None = None
        if offered is None:
            error = "there is no such tool among those on offer"
        elif self._left <= 0:
            error = "there were too many calls for this answer: answer with what you have"
        else:
            self._left -= 1
            try:
                output = await self._servers.call(
                    offered.server, offered.name, call.arguments, tenant=self._tenant, request_id=self._request_id
                )
            except McpError as failure:
                error = str(failure)
        label, _, name = call.name.partition(_BETWEEN)
        await self._add(
            "mcp", "mcp_call", server_label=label, name=name, arguments=call.arguments, output=output, error=error,
            approval_request_id=approval, status="completed" if error is None else "failed",
        )  # fmt: skip
        self._note(call, output if error is None else f"The call failed: {error}")

    def _note(self, call: ToolCallDelta, result: str | None) -> None:
        self.turns.append(Turn("assistant", None, tool_calls=(ToolCall(call.id, call.name, call.arguments),)))
        self.turns.append(Turn("tool", result or "", tool_call_id=call.id))

    async def _add(self, prefix: str, kind: str, **fields: Any) -> None:
        await self._put(self._items.of_kind(prefix, len(self.made), kind, **fields))

    async def _put(self, item: dict[str, Any]) -> None:
        self.made.append(item)
        await self._tell(len(self.made) - 1, item)

    def _count(self, usage: Usage) -> Usage:
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens
        self._cached += usage.cached_tokens
        self._written += usage.written_tokens
        self._reasoning += usage.reasoning_tokens
        return Usage(
            self._prompt,
            self._completion,
            self._cached,
            reasoning_tokens=self._reasoning,
            written_tokens=self._written,
        )


def uses_servers(request: ResponsesRequest, servers: McpServers) -> bool:
    """Whether a request has tools of MCP servers, where there are any."""
    return servers.any and any(tool.type == MCP for tool in request.tools or ())


def plain_choice(choice: Any) -> Any:
    """A choice of tools as one of functions: ``{"type": "mcp", "server_label": ..., "name": ...}`` is one by its whole name."""
    match choice:
        case {"type": "mcp", "server_label": str() as label, "name": str() as name}:
            return {"type": "function", "name": f"{label}{_BETWEEN}{name}"}
        case {"type": "mcp"}:
            return "required"
    return choice


def _names(given: Any, field: str) -> frozenset[str] | None:
    """The names of tools that a filter lets through; None: all."""
    match given:
        case None:
            return None
        case [*names] if all(isinstance(name, str) for name in names):
            return frozenset(names)
        case {"tool_names": [*names]} if all(isinstance(name, str) for name in names):
            return frozenset(names)
    raise InvalidArgumentError('it must be a list of names, or {"tool_names": [...]}', field=field)


def _needs_approval(rule: Any, name: str, usual: str, field: str) -> bool:
    """Whether a client has to approve calls of a tool; ``usual`` is what the operator says of the server."""
    if usual == "always":
        return True
    match rule:
        case None:
            return usual != "never"
        case "always" | "never":
            return bool(rule == "always")
        case {"never": wanted, **rest} if name in (_names(wanted, field) or ()):
            return False
        case {"always": wanted, **rest} if name in (_names(wanted, field) or ()):
            return True
        case {**rest} if rest.keys() <= {"always", "never"}:
            return usual != "never"
    raise InvalidArgumentError('it must be "always", "never" or {"always": {...}, "never": {...}}', field=field)


def listed_in(given: Any) -> frozenset[str]:
    """The labels of servers whose tools an input lists."""
    if not isinstance(given, list):
        return frozenset()
    return frozenset(
        str(item.get("server_label"))
        for item in given
        if isinstance(item, dict) and item.get("type") == "mcp_list_tools"
    )
