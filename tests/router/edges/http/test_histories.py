"""What a history may hold: what a model said and was handed out is never the client's fault."""

import json

import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]


def chat(arguments) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
    }


def responses(arguments) -> dict:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return {"input": [*HI, call, {"type": "function_call_output", "call_id": "1", "output": "x"}]}


def messages(arguments) -> dict:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    return {
        "max_tokens": 9,
        "messages": [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
    }


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (RESPONSES, responses), (MESSAGES, messages)])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        (None, {}),
        ({}, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', {}),
        ('{"a": "b', {"a": "b"}),
        ("null", {}),
        ("oops", {"arguments": "oops"}),
    ],
)
async def test_cut_and_empty_arguments_in_a_history_are_taken(cluster, path, body, arguments, shown) -> None:
    answer = await cluster.http.post(path, json=body(arguments))
    assert answer.status_code == 200, answer.text
    (call,) = cluster.tokenizer.chats[-1].messages[1].tool_calls
    assert json.loads(call.arguments) == shown


async def test_a_call_that_was_cut_and_handed_out_can_be_gone_on_from(cluster) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    cluster.answer_with('<call f>{"city": "Par')
    first = (await cluster.http.post(RESPONSES, json={"input": "hi", "tools": tools})).json()
    assert first["output"][0]["arguments"] == '{"city": "Par'
    item = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "x"}
    for previous in (
        {"input": [*HI, first["output"][0], item]},
        {"previous_response_id": first["id"], "input": [item]},
    ):
        answer = await cluster.http.post(RESPONSES, json={"tools": tools, **previous})
        assert answer.status_code == 200, answer.text
        (call,) = cluster.tokenizer.chats[-1].messages[1].tool_calls
        assert json.loads(call.arguments) == {"city": "Par"}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"reasoning": "why"}, "why"),
        ({"reasoning_content": "why"}, "why"),
        ({"reasoning": "why", "reasoning_content": "because"}, "because"),
        ({"reasoning": "why", "reasoning_content": ""}, "why"),
        ({"reasoning": None}, ""),
        ({"reasoning": [{"type": "text"}]}, ""),
    ],
)
async def test_reasoning_in_a_history_is_kept_by_both_names(cluster, said, shown) -> None:
    history = [*HI, {"role": "assistant", "content": "yes", **said}, {"role": "user", "content": "more"}]
    answer = await cluster.http.post(CHAT, json={"messages": history})
    assert answer.status_code == 200, answer.text
    assert cluster.tokenizer.chats[-1].messages[1].reasoning == shown
