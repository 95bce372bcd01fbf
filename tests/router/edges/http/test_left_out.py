"""What nothing here serves is taken and named, as the servers that clients are made for do; or refused, where that is wished."""

import json
import logging

import pytest

from sapwood_router.edges.http.left_out import LeftOut, LeftOutLog

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
GOOD = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/generate": {"text": "hi"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
OWN = {"name": "f", "input_schema": SCHEMA}
FOREIGN = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [FLAT]},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
]
SERVERS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


def ignored(answer) -> list[str]:
    return answer.headers.get("x-sapwood-ignored", "").split(", ")


@pytest.mark.parametrize("path", GOOD)
async def test_unknown_parameters_are_taken_and_named_in_a_header(cluster, path) -> None:
    answer = await cluster.http.post(path, json={**GOOD[path], "cache_prompt": True, "typical_p": 0.9})
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == ["cache_prompt", "typical_p"]
    assert "x-sapwood-ignored" not in (await cluster.http.post(path, json=GOOD[path])).headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/generate"])
async def test_a_stream_names_them_too(cluster, path) -> None:
    answer = await cluster.http.post(path, json={**GOOD[path], "typical_p": 0.9, "stream": True})
    assert (answer.status_code, ignored(answer)) == (200, ["typical_p"])
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", GOOD)
async def test_unknown_parameters_are_refused_where_that_is_wished(strict, path) -> None:
    answer = await strict.http.post(path, json={**GOOD[path], "typical_p": 0.9})
    assert answer.status_code == 400
    assert "typical_p" in answer.json()["error"]["message"]


async def test_each_name_is_logged_once_a_process(cluster, caplog) -> None:
    with caplog.at_level(logging.WARNING, "sapwood_router.edges.http.left_out"):
        for path in (CHAT, COMPLETIONS, CHAT):
            await cluster.http.post(path, json={**GOOD[path], "typical_p": 1, "temprature": 0})
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "typical_p" in told[0]
    assert "temprature; did you mean 'temperature'?" in told[1]


def test_names_are_cut_escaped_and_few() -> None:
    left_out = LeftOut(LeftOutLog())
    for name in ("a\r\nset-cookie: x", "b,c", "ü" * 999, *map(str, range(1000))):
        left_out.parameter(name, str)
    header = left_out.header()
    assert header.startswith(b"a__set-cookie:_x, b_c, \\xfc")
    assert header.endswith(b", 987 more")
    assert len(header) < 1024 and header.isascii() and b"\n" not in header


def test_only_so_many_names_are_logged(caplog) -> None:
    log = LeftOutLog()
    for number in range(1000):
        LeftOut(log).parameter(f"name{number}", str)
    assert len(caplog.records) == 256


async def test_the_name_of_a_prompt_elsewhere_is_refused_all_the_same(cluster) -> None:
    answer = await cluster.http.post(COMPLETIONS, json={"messages": HI})
    assert answer.json()["error"]["message"] == "unknown parameter: 'messages'; /v1/chat/completions takes it"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("given", "thinks"),
    [
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": True}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "disabled"}}, False),
    ],
)
async def test_whether_to_think_reaches_the_template(cluster, path, given, thinks) -> None:
    answer = await cluster.http.post(path, json={**GOOD[path], **given})
    assert answer.status_code == 200, answer.text
    assert json.loads(cluster.tokenizer.chats[-1].template_variables) == {"enable_thinking": thinks, "thinking": thinks}
    over = {**given, "chat_template_kwargs": {"enable_thinking": "mine"}}
    await cluster.http.post(path, json={**GOOD[path], **over})
    assert json.loads(cluster.tokenizer.chats[-1].template_variables)["enable_thinking"] == "mine"
    answer = await cluster.http.post(path, json={**GOOD[path], "thinking": "much"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking")


@pytest.mark.parametrize(
    ("path", "own", "foreign", "forced"),
    [
        (CHAT, FUNCTION, FOREIGN, {"type": "custom", "custom": {"name": "apply_patch"}}),
        (RESPONSES, FLAT, FOREIGN, {"type": "custom", "name": "apply_patch"}),
        (MESSAGES, OWN, SERVERS, {"type": "tool", "name": "bash"}),
        ("/v1/messages/count_tokens", OWN, SERVERS, {"type": "tool", "name": "bash"}),
    ],
)
async def test_tools_that_nothing_here_runs_are_left_out(cluster, path, own, foreign, forced) -> None:
    for choice in ({}, {"tool_choice": forced}):
        answer = await cluster.http.post(path, json={**GOOD[path], "tools": [foreign[0], own, *foreign[1:]], **choice})
        assert answer.status_code == 200, answer.text
        assert {f"tools={tool['type']}" for tool in foreign} <= {*ignored(answer)}
        (shown,) = json.loads(cluster.tokenizer.chats[-1].tools)
        assert (shown["type"], shown["function"]["name"]) == ("function", "f")
    required = {"type": "any"} if foreign is SERVERS else "required"
    answer = await cluster.http.post(path, json={**GOOD[path], "tools": foreign, "tool_choice": required})
    assert answer.status_code == 200, answer.text
    assert cluster.tokenizer.chats[-1].tools == ""


async def test_allowed_tools_that_nothing_here_runs_are_left_out(cluster) -> None:
    both = {"mode": "required", "tools": [FLAT, {"type": "web_search"}]}
    body = {"input": "hi", "tools": [FLAT, FOREIGN[0]], "tool_choice": {"type": "allowed_tools", **both}}
    answer = await cluster.http.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    allowed = {"mode": "required", "tools": [FUNCTION, {"type": "web_search"}]}
    body = {"tools": [FUNCTION, FOREIGN[0]], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    answer = await cluster.http.post(CHAT, json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    assert len(json.loads(cluster.tokenizer.chats[-1].tools)) == 1


async def test_a_history_of_tools_that_nothing_here_runs_is_left_out(cluster) -> None:
    calls = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
    ]
    body = {"input": [*HI, *calls, {"role": "user", "content": "more"}]}
    answer = await cluster.http.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == [f"input={call['type']}" for call in calls]
    assert [message.content for message in cluster.tokenizer.chats[-1].messages] == ["hi", "more"]
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "found"},
    ]
    said = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": "more"}]
    answer = await cluster.http.post(MESSAGES, json={"messages": said, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == ["messages=server_tool_use", "messages=web_search_tool_result"]
    assert [message.content for message in cluster.tokenizer.chats[-1].messages] == ["hi", "found", "more"]


async def test_tools_that_nothing_here_runs_are_refused_where_that_is_wished(strict) -> None:
    for path, tool in ((CHAT, FOREIGN[0]), (RESPONSES, FOREIGN[0]), (MESSAGES, SERVERS[0])):
        answer = await strict.http.post(path, json={**GOOD[path], "tools": [tool]})
        assert answer.status_code == 400
        assert tool["type"] in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"max_tokens": 140.0, "n": 2.0, "top_k": 5.0, "seed": 7.0}),
        (CHAT, {"max_completion_tokens": 140.0}),
        (COMPLETIONS, {"max_tokens": 140.0, "logprobs": 2.0}),
        (RESPONSES, {"max_output_tokens": 140.0}),
        (MESSAGES, {"max_tokens": 140.0, "top_k": 5.0, "thinking": {"type": "enabled", "budget_tokens": 1024.0}}),
        ("/generate", {"sampling_params": {"max_new_tokens": 140.0, "min_new_tokens": 1.0}}),
        ("/rerank", {"top_n": 1.0}),
        ("/v1/embeddings", {"dimensions": 3.0}),
    ],
)
async def test_whole_numbers_may_be_written_with_a_point(cluster, path, body) -> None:
    answer = await cluster.http.post(path, json={**GOOD[path], **body})
    assert answer.status_code == 200, answer.text
    if any("max" in name for name in (*body, *body.get("sampling_params", ()))):
        assert {call.request.sampling.max_tokens for call in cluster.calls()} == {140}


async def test_a_broken_number_is_no_whole_one(cluster) -> None:
    for value in (140.5, 1e400, True, "140"):
        answer = await cluster.http.post(CHAT, content=json.dumps({"messages": HI, "max_tokens": value}).encode())
        assert answer.status_code == 400, value


async def test_a_slash_at_the_end_of_a_path_does_not_matter(cluster) -> None:
    for path, body in GOOD.items():
        assert (await cluster.http.post(f"{path}/", json=body)).status_code == 200, path
    for path in ("/v1/models/", "/v1/models/fake/", "/health/", "/version/", "/ui/"):
        answer = await cluster.http.get(path)
        assert answer.status_code == 200, path
    assert (await cluster.http.get("/v1/models/")).json()["object"] == "list"
    assert (await cluster.http.get("/v1/models/fake/")).json()["id"] == "fake"
    assert (await cluster.http.get("/ui")).status_code == 308


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "GZIP, identity"])
async def test_a_packed_body_is_415(cluster, coding) -> None:
    answer = await cluster.http.post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": coding})
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
    body = json.dumps({"messages": HI}).encode()
    answer = await cluster.http.post(CHAT, content=body, headers={"content-encoding": "identity"})
    assert answer.status_code == 200


async def test_what_an_answer_may_be_made_without_is_left_out(cluster, strict) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    for path, given in (
        (MESSAGES, {"context_management": edits, "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}),
        ("/v1/messages/count_tokens", {"context_management": edits}),
        (CHAT, {"web_search_options": {}}),
        (RESPONSES, {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}),
    ):
        answer = await cluster.http.post(path, json={**GOOD[path], **given})
        assert (answer.status_code, ignored(answer)) == (200, [*given]), answer.text
        answer = await strict.http.post(path, json={**GOOD[path], **given})
        assert answer.status_code == 400
        assert next(iter(given)) in answer.json()["error"]["message"]


async def test_custom_calls_in_a_chats_history_are_left_out(cluster) -> None:
    calls = [
        {"id": "1", "type": "custom", "custom": {"name": "apply_patch", "input": "x"}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ]
    said = [*HI, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "2", "content": "x"}]
    answer = await cluster.http.post(CHAT, json={"messages": said})
    assert (answer.status_code, ignored(answer)) == (200, ["messages=custom"]), answer.text
    assert [call.id for call in cluster.tokenizer.chats[-1].messages[1].tool_calls] == ["2"]
    without = [*HI, {"role": "assistant", "tool_calls": [{"id": "2", "type": "function"}]}]
    answer = await cluster.http.post(CHAT, json={"messages": without})
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function"


FORMS = {
    "json_schema": SCHEMA,
    "grammar": 'root ::= "a"',
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "structural_tag": "{}",
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
    "stop_regex": "a",
}
TAKEN_BY = {RESPONSES: "text", MESSAGES: "output_config", "/generate": "sampling_params", "/api/chat": "format"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/generate", "/api/chat", "/v2/chat"])
async def test_a_form_of_the_answer_is_enforced_or_refused_but_never_left_out(cluster, path) -> None:
    good = GOOD.get(path, {"model": "fake", "messages": HI, "stream": False})
    refused = 0
    for name, form in FORMS.items():
        answer = await cluster.http.post(path, json={**good, name: form})
        assert "x-sapwood-ignored" not in answer.headers
        if answer.status_code == 400:
            refused += name in answer.text
        else:
            assert (answer.status_code, name) == (200, name)
            assert cluster.calls()[-1].request.HasField("grammar"), name
    assert (refused == len(FORMS)) == (path in TAKEN_BY)
    if path in TAKEN_BY:
        assert f"{TAKEN_BY[path]} takes it" in answer.text
    nothing = await cluster.http.post(path, json={**good, "guided_json": None, "grammar": "", "images": []})
    assert (nothing.status_code, "x-sapwood-ignored" in nothing.headers) == (200, False)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
async def test_parts_of_a_prompt_that_the_model_would_not_see_are_refused(cluster, path) -> None:
    for name, part in (("images", ["aGk="]), ("documents", [{"text": "a"}]), ("input_ids", [5])):
        answer = await cluster.http.post(path, json={**GOOD[path], name: part})
        assert (answer.status_code, name in answer.text) == (400, True)


async def test_the_form_of_an_answer_says_nothing_to_the_count_of_a_prompt(cluster) -> None:
    for body in ({"prompt": "hi"}, {"messages": HI}):
        answer = await cluster.http.post("/tokenize", json={**body, "response_format": {"type": "json_object"}})
        assert answer.status_code == 200
