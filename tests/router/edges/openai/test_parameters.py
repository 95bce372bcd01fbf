"""Parameters of the OpenAI API: which are taken, which are refused, and that a refusal names the parameter."""

import re
from pathlib import Path

import pytest

from sapwood_router.edges.openai.other_parameters import CHAT_NEUTRAL, COMPLETION_NEUTRAL, EMBEDDING_NEUTRAL, IGNORED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]

WRONG = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1, -2]]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [2**32]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 100_000}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**40}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_p": False}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "best_of": 0}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 600, "n": 2}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": -1}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (CHAT, {"messages": HI, "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "n": 1.5}, "n"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [*HI, {"role": "function", "content": "x", "name": "f"}]}, "messages[1].role"),
    (CHAT, {"messages": [*HI, {"role": "system", "content": "late"}]}, "messages[1].role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
        "messages[0].content[0].video_url",
    ),
    (
        "/v1/embeddings",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0]",
    ),
    (
        CHAT,
        {"messages": [{"role": "system", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"promt": "a"}, "unknown parameter: 'promt'; did you mean 'prompt'?"),
        ("/v1/completions", {"prompt": "a", "max_new_tokens": 1}, "'max_new_tokens'; did you mean 'max_tokens'?"),
        ("/v1/completions", {"messages": []}, "'messages'; /v1/chat/completions takes it"),
        ("/v1/chat/completions", {"prompt": "a"}, "'prompt'; /v1/completions takes it"),
        ("/v1/chat/completions", {"messages": [], "quux": 1}, "unknown parameter: 'quux'"),
        (
            "/v1/chat/completions",
            {"messages": [], "functions": [{"name": "f"}]},
            "functions is not supported: use tools",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "stream": True, "stream_options": {"includes_usage": True}},
            "'stream_options.includes_usage'; did you mean 'include_usage'?",
        ),
    ],
)
async def test_an_unknown_parameter_is_told_which_was_meant(strict, path, body, told) -> None:
    response = await strict.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(told)


async def test_a_wrong_parameter_is_named_and_the_service_goes_on(strict) -> None:
    for path, body, param in WRONG:
        response = await strict.http.post(path, json={"model": "fake", **body})
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), body
        assert error["message"]
    assert (await strict.http.post(COMPLETIONS, json={"prompt": "ok"})).json()["choices"][0]["text"] == "ok"


async def test_parameters_that_ask_for_nothing_are_taken(cluster) -> None:
    neutral = {
        "n": 1, "echo": False, "logprobs": None, "best_of": 1, "suffix": None, "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "stream_options": None, "nobody_knows_it": None,
    }  # fmt: skip
    assert (await cluster.http.post(COMPLETIONS, json={"prompt": "a", **neutral})).status_code == 200
    neutral = {
        "n": 1, "logprobs": False, "response_format": {"type": "text"}, "tools": None, "nobody_knows_it": None,
        "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "parallel_tool_calls": True,
    }  # fmt: skip
    assert (await cluster.http.post(CHAT, json={"messages": HI, **neutral})).status_code == 200
    assert (await cluster.http.post(CHAT, json={"messages": None})).json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "prompt", "neutral"),
    [(COMPLETIONS, {"prompt": "a"}, COMPLETION_NEUTRAL), (CHAT, {"messages": HI}, CHAT_NEUTRAL)],
)
async def test_what_other_servers_know_is_taken_where_it_asks_for_nothing(strict, path, prompt, neutral) -> None:
    cluster = strict
    for pick in (0, -1):
        values = {name: values[pick] for name, values in neutral.items() if values}
        answer = await cluster.http.post(path, json={**prompt, **dict.fromkeys(neutral), **values})
        assert answer.status_code == 200, answer.text
    answer = await cluster.http.post(path, json={**prompt, **dict.fromkeys(IGNORED, "x")})
    assert answer.status_code == 200, answer.text
    answer = await cluster.http.post(path, json={**prompt, "top_p": 0})
    assert answer.status_code == 200, answer.text
    settings = [call.request.sampling for call in cluster.calls()]
    assert [(one.top_k, one.HasField("top_p")) for one in settings if one.top_k] == [(1, False)], "the likeliest token"
    for name in neutral:
        answer = await cluster.http.post(path, json={**prompt, name: "wanted"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert name in answer.json()["error"]["message"]


def test_the_documentation_names_what_is_not_served() -> None:
    text = (Path(__file__).parents[4] / "docs" / "clients.md").read_text()
    rows = {
        row.split("|")[1].strip(): re.findall(r"`(\w+)`", row.split("|")[2])
        for row in re.findall(r"^\|.*\|$", text, re.M)
    }
    ignored = next(names for title, names in rows.items() if title.startswith("ignored"))
    both = next(names for title, names in rows.items() if title.startswith("taken only"))
    assert set(ignored) == IGNORED
    assert {*both, *rows["the same: completions"]} == {*COMPLETION_NEUTRAL}
    assert {*both, *rows["the same: chat"]} == {*CHAT_NEUTRAL}
    assert {*rows["the same: embeddings"]} == {*EMBEDDING_NEUTRAL}
