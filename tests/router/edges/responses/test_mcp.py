"""Tools of real MCP servers in /v1/responses, by OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import uvicorn
import yaml
from mcp.server.mcpserver import Context, MCPServer

from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_testing.ports import port_of_its_own
from sapwood_testing.router.fake_tokenizer import encode

ADD = '<call docs:add>{"a": 2, "b": 3}</call>'


class Server:
    """A real MCP server, over streamable HTTP."""

    def __init__(self) -> None:
        self.port = port_of_its_own()
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.calls: list[str] = []
        self.authorizations: list[str | None] = []
        made = MCPServer("docs")

        @made.tool()
        def add(a: int, b: int, ctx: Context) -> int:
            """Adds two numbers."""
            self.calls.append(f"{a}+{b}")
            self.authorizations.append(ctx.request_context.request.headers.get("authorization"))
            return a + b

        @made.tool()
        def fail() -> str:
            """Fails."""
            raise ValueError("it broke")

        @made.tool()
        async def hang() -> str:
            """Never ends."""
            await asyncio.sleep(600)
            return ""

        app = made.streamable_http_app(stateless_http=True, json_response=True)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning"))

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def mcp_file(tmp_path, server) -> Callable[..., Any]:
    def write(per_request: dict | None = None, **changed: Any):
        path = tmp_path / "mcp.yaml"
        servers = {"docs": {"url": server.url, "require-approval": "never", **changed}}
        path.write_text(yaml.safe_dump({"servers": servers, "per-request": per_request or {}}))
        return path

    return write


def script(cluster, *answers: str) -> None:
    """Has the workers give one answer after another."""
    left = list(answers)

    def next_one(prompt) -> list[int]:
        return encode(left.pop(0) if len(left) > 1 else left[0])[1:]

    for worker in cluster.workers:
        worker.script.tokens = next_one


DOCS = {"type": "mcp", "server_label": "docs"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_listed_called_and_its_result_answered(make_cluster, mcp_file, server, stream) -> None:
    async with make_cluster(1, mcp=mcp_file()) as cluster:
        script(cluster, ADD, "It is 5.")
        asked: Any = {"model": "fake", "input": "2+3?", "tools": [DOCS], "stream": stream}
        answer = await cluster.openai.responses.create(**asked)
        if stream:
            events = [event async for event in answer]
            answer = events[-1].response
            kinds = [event.type for event in events]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            for kind in (
                "mcp_list_tools.completed",
                "mcp_call.in_progress",
                "mcp_call_arguments.done",
                "mcp_call.completed",
            ):
                assert f"response.{kind}" in kinds
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "It is 5."
        listed, call, message = answer.output
        assert (listed.type, {tool.name for tool in listed.tools}) == ("mcp_list_tools", {"add", "fail", "hang"})
        assert (call.type, call.server_label, call.name, call.output) == ("mcp_call", "docs", "add", "5")
        assert (call.error, message.content[0].text, server.calls) == (None, "It is 5.", ["2+3"])
        last = cluster.tokenizer.chats[-1].messages
        assert [turn.role for turn in last] == ["user", "assistant", "tool"]
        assert (last[1].tool_calls[0].name, last[2].content) == ("docs:add", "5")
        assert answer.usage.input_tokens > answer.usage.output_tokens > len("It is 5.")
        more = await cluster.openai.responses.create(model="fake", input="Thanks.", previous_response_id=answer.id)
        roles = [turn.role for turn in cluster.tokenizer.chats[-1].messages]
        assert (more.status, roles) == ("completed", ["user", "assistant", "tool", "assistant", "user"])


@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_waits_for_approval_and_is_made_or_not(make_cluster, mcp_file, server, approve) -> None:
    async with make_cluster(1, mcp=mcp_file(**{"require-approval": "client"})) as cluster:
        script(cluster, ADD, "Done.")
        first = await cluster.openai.responses.create(model="fake", input="2+3?", tools=[DOCS])
        _, request = first.output
        assert (request.type, request.name, request.server_label) == ("mcp_approval_request", "add", "docs")
        assert server.calls == []
        told = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve}
        second = await cluster.openai.responses.create(
            model="fake", input=[told], tools=[DOCS], previous_response_id=first.id
        )
        assert server.calls == (["2+3"] if approve else [])
        tool = cluster.tokenizer.chats[-1].messages[-1]
        assert (tool.role, tool.content) == ("tool", "5" if approve else "The user did not approve this call.")
        calls = [item for item in second.output if item.type == "mcp_call"]
        assert [call.approval_request_id for call in calls] == ([request.id] if approve else [])
        assert second.output_text == "Done."
        wrong = {**told, "approval_request_id": "mcpr_none"}
        with pytest.raises(openai.NotFoundError):
            await cluster.openai.responses.create(model="fake", input=[wrong], tools=[DOCS])


@pytest.mark.parametrize(
    ("usual", "rule", "asks"),
    [
        ("client", None, True),
        ("client", "never", False),
        ("client", {"never": {"tool_names": ["add"]}}, False),
        ("client", {"never": {"tool_names": ["fail"]}}, True),
        ("never", None, False),
        ("never", {"always": {"tool_names": ["add"]}}, True),
        ("always", "never", True),
    ],
)
async def test_approval_goes_by_the_operators_and_the_requests_rules(make_cluster, mcp_file, usual, rule, asks) -> None:
    async with make_cluster(1, mcp=mcp_file(**{"require-approval": usual})) as cluster:
        script(cluster, ADD, "Done.")
        tool = DOCS | ({} if rule is None else {"require_approval": rule})
        answer = await cluster.openai.responses.create(model="fake", input="x", tools=[tool])
        assert any(item.type == "mcp_approval_request" for item in answer.output) == asks


async def test_a_call_that_fails_or_hangs_is_told_to_the_model(make_cluster, mcp_file) -> None:
    async with make_cluster(1, mcp=mcp_file(timeout=1.5)) as cluster:
        for name, said in (("fail", "Error executing tool fail"), ("hang", "1.5 s"), ("none", "no tool")):
            script(cluster, f"<call docs:{name}>{{}}</call>", "Sorry.")
            answer = await cluster.openai.responses.create(model="fake", input="x", tools=[DOCS])
            if name == "none":
                assert answer.output[-1].type == "function_call", "it is none of the server's"
                continue
            call = next(item for item in answer.output if item.type == "mcp_call")
            assert call.output is None and said in call.error and answer.output_text == "Sorry."


async def test_calls_are_bounded(make_cluster, mcp_file, server) -> None:
    async with make_cluster(1, mcp=mcp_file()) as cluster:
        script(cluster, ADD, ADD, ADD, ADD, "Enough.")
        answer = await cluster.openai.responses.create(model="fake", input="x", tools=[DOCS], max_tool_calls=2)
        assert len(server.calls) == 2 and answer.output_text == "Enough."
        errors = [item.error for item in answer.output if item.type == "mcp_call"]
        assert errors[:2] == [None, None] and all("too many" in error for error in errors[2:])


async def test_only_what_the_file_allows_is_used(make_cluster, mcp_file, server) -> None:
    async with make_cluster(1, mcp=mcp_file(tools=["add"])) as cluster:
        script(cluster, "Hi.")
        answer = await cluster.openai.responses.create(model="fake", input="x", tools=[DOCS])
        assert [tool.name for tool in answer.output[0].tools] == ["add"]
        for tool, param in (
            ({**DOCS, "server_label": "other"}, "tools[0].server_label"),
            ({**DOCS, "server_url": server.url}, "tools[0].server_url"),
            ({**DOCS, "server_url": "file:///etc/passwd"}, "tools[0].server_url"),
            ({**DOCS, "headers": {"Host": "x"}}, "tools[0].headers"),
            ({**DOCS, "require_approval": "maybe"}, "tools[0].require_approval"),
            ({**DOCS, "allowed_tools": 5}, "tools[0].allowed_tools"),
        ):
            refused = await cluster.http.post("/v1/responses", json={"input": "x", "tools": [tool]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_servers_at_private_addresses_are_refused_unless_allowed(make_cluster, mcp_file, server) -> None:
    for private in (False, True):
        rules = {"hosts": ["127.0.0.1", "localhost"], "private-addresses": private}
        async with make_cluster(1, mcp=mcp_file(per_request=rules)) as cluster:
            script(cluster, "Hi.")
            for host in ("127.0.0.1", "localhost"):
                tool = {"type": "mcp", "server_label": "mine", "server_url": f"http://{host}:{server.port}/mcp"}
                answer = await cluster.http.post("/v1/responses", json={"input": "x", "tools": [tool]})
                assert answer.status_code == (200 if private else 400), answer.text
                assert private or "private address" in answer.text


async def test_credentials_go_to_the_server_alone(
    make_cluster, mcp_file, server, tmp_path, monkeypatch, caplog
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("DOCS_TOKEN", "secret-all")
    monkeypatch.setenv("DOCS_ALICE", "secret-alice")
    keys = {name: make_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {hash_key(key)}\n" for name, key in keys.items()))
    file = mcp_file(**{"token-env": "DOCS_TOKEN", "tenant-token-envs": {"alice": "DOCS_ALICE"}})
    async with make_cluster(1, mcp=file, api_keys=path) as cluster:
        for name, tool in (("alice", DOCS), ("bob", DOCS), ("bob", {**DOCS, "authorization": "secret-own"})):
            script(cluster, ADD, "Done.")
            client = cluster.openai.with_options(api_key=keys[name])
            answer = await client.responses.create(model="fake", input="x", tools=[tool])
            kept = await client.responses.retrieve(answer.id)
            assert "secret" not in answer.model_dump_json() + kept.model_dump_json()
        assert server.authorizations == ["Bearer secret-alice", "Bearer secret-all", "Bearer secret-own"]
        assert "secret" not in caplog.text
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("mcp request=")]
        assert ["tenant=alice" in line and "tool=add outcome=done" in line for line in lines] == [True, False, False]


async def test_functions_of_the_clients_end_the_loop(make_cluster, mcp_file) -> None:
    async with make_cluster(1, mcp=mcp_file()) as cluster:
        script(cluster, f"{ADD}<call mine>{{}}</call>", "never")
        function = {"type": "function", "name": "mine", "parameters": {"type": "object"}}
        answer = await cluster.openai.responses.create(model="fake", input="x", tools=[DOCS, function])
        assert [item.type for item in answer.output] == ["mcp_list_tools", "mcp_call", "function_call"]
