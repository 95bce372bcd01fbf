"""SGLang's own API, called as its tools call it."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path

from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.openai.parameters import sampling_of
from sapwood_router.edges.sglang import request
from sapwood_router.edges.sglang.request import NEUTRAL, SETTINGS_NEUTRAL, GenerateRequest
from sapwood_testing.router.fake_tokenizer import BOS, encode

GENERATE = "/generate"


async def test_a_text_is_gone_on_with(cluster) -> None:
    answer = (await cluster.http.post(GENERATE, json={"text": "hello", "rid": "mine"})).json()
    latency = answer["meta_info"].pop("e2e_latency")
    assert latency > 0
    assert answer["text"] == "hello"
    assert answer["output_ids"] == [*encode("hello")[1:], 1]
    assert answer["meta_info"] == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "cached_tokens": 0,
    }
    ids = (
        await cluster.http.post(GENERATE, json={"input_ids": encode("abc"), "sampling_params": {"stop": ["b"]}})
    ).json()
    assert (ids["text"], ids["meta_info"]["finish_reason"]) == ("a", {"type": "stop", "matched": "b"})
    settings = {"stop": "b", "no_stop_trim": True}
    kept = (await cluster.http.post(GENERATE, json={"text": "abc", "sampling_params": settings})).json()
    assert (kept["text"], kept["meta_info"]["finish_reason"]) == ("ab", {"type": "stop", "matched": "b"})


async def test_several_prompts_and_several_answers_are_a_list(cluster) -> None:
    settings = {"max_new_tokens": 2}
    for prompts in ({"text": ["abc", "def"]}, {"input_ids": [encode("abc"), encode("def")]}):
        answers = (await cluster.http.post(GENERATE, json={**prompts, "sampling_params": settings})).json()
        assert [answer["text"] for answer in answers] == ["ab", "de"]
        assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    answers = (await cluster.http.post(GENERATE, json={"text": "abc", "sampling_params": {"n": 3}})).json()
    assert [answer["text"] for answer in answers] == ["abc"] * 3
    assert isinstance((await cluster.http.post(GENERATE, json={"text": ["abc"]})).json(), list)


async def test_log_probabilities_are_told_as_sglang_tells_them(cluster) -> None:
    prompt, answer = encode("abc"), [*encode("abc")[1:], 1]
    asked = {"text": "abc", "return_logprob": True}

    async def told(**more) -> dict:
        found = (await cluster.http.post(GENERATE, json={**asked, **more})).json()
        return {name: value for name, value in found["meta_info"].items() if "logprobs" in name}

    assert await told() == {
        "input_token_logprobs": [],
        "output_token_logprobs": [[-token / 8, token, None] for token in answer],
    }
    texts = ["<2>", "a", "b", "c"]
    found = await told(logprob_start_len=1, top_logprobs_num=2, return_text_in_logprobs=True)
    assert found["input_token_logprobs"] == [
        [None if number == 1 else -prompt[number] / 8, prompt[number], texts[number]] for number in (1, 2, 3)
    ]
    assert found["input_top_logprobs"] == [None] + [
        [[-other / 8, other, chr(other - 3)] for other in (token, token + 1)] for token in prompt[2:]
    ]
    assert [item[2] for item in found["output_token_logprobs"]] == ["a", "b", "c", "<1>"]
    assert [[item[1] for item in items] for items in found["output_top_logprobs"]] == [
        [token, token + 1] for token in answer
    ]
    whole = await told(logprob_start_len=0)
    assert [item[:2] for item in whole["input_token_logprobs"]] == [
        [None, prompt[0]],
        *([-token / 8, token] for token in prompt[1:]),
    ]
    stopped = await told(sampling_params={"stop": "b"})
    assert [item[1] for item in stopped["output_token_logprobs"]] == answer[:2]
    assert (await told(logprob_start_len=99))["input_token_logprobs"] == []


async def test_a_prompt_may_be_computed_alone(cluster) -> None:
    body = {"text": ["abc", "de"], "return_logprob": True, "logprob_start_len": 0}
    answers = (await cluster.http.post(GENERATE, json={**body, "sampling_params": {"max_new_tokens": 0}})).json()
    for text, answer in zip(body["text"], answers, strict=True):
        info = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], info["output_token_logprobs"]) == ("", [], [])
        assert (info["finish_reason"], info["completion_tokens"]) == ({"type": "length", "length": 0}, 0)
        assert [item[1] for item in info["input_token_logprobs"]] == encode(text)


async def test_a_stream_tells_the_text_so_far(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.002
    answer = await cluster.http.post(GENERATE, json={"text": "hello you", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    told = [json.loads(event) for event in events]
    assert done == "[DONE]" and len(told) > 2
    for one, other in pairwise(told):
        assert other["text"].startswith(one["text"])
        assert one["meta_info"]["finish_reason"] is None
        assert one["meta_info"]["completion_tokens"] == len(one["output_ids"]) <= len(other["output_ids"])
    assert (told[-1]["text"], told[-1]["meta_info"]["finish_reason"]["type"]) == ("hello you", "stop")


async def test_a_streams_events_tell_of_their_own_tokens_and_how_many_there_are_so_far(cluster) -> None:
    for worker in cluster.workers:
        worker.script.delay = 0.002
    asked = {"text": "hello you", "stream": True, "return_logprob": True, "top_logprobs_num": 2}
    answer = await cluster.http.post(GENERATE, json=asked | {"return_text_in_logprobs": True})
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines]
    assert done == "[DONE]"
    assert len(events) > 2
    before = 0
    for event in events:
        info = event["meta_info"]
        tokens = info["output_token_logprobs"]
        assert info["output_token_logprobs_length"] == before + len(tokens) == info["completion_tokens"]
        assert [item[1] for item in tokens] == event["output_ids"][before:]
        assert len(info["output_top_logprobs"]) == len(tokens)
        before += len(tokens)
    whole = (await cluster.http.post(GENERATE, json=asked | {"stream": False, "return_text_in_logprobs": True})).json()
    told = [item for event in events for item in event["meta_info"]["output_token_logprobs"]]
    assert told == whole["meta_info"]["output_token_logprobs"]
    assert all(item[2] for item in told[:-1])


async def test_joining_keys_and_values_is_refused_with_what_to_do_instead(cluster) -> None:
    answer = await cluster.http.post("/concate_and_append_request", json={"src_rids": ["a"], "dst_rid": "b"})
    assert answer.status_code == 501
    assert "enable_parallel_encoding" in answer.json()["error"]["message"]


async def test_settings_reach_the_worker_and_grammars_the_tokenizer(cluster) -> None:
    settings = {
        "temperature": 0.5, "top_k": -1, "min_new_tokens": 2, "max_new_tokens": 9, "sampling_seed": 5, "ignore_eos": True,
        "regex": "[a-z]+", "skip_special_tokens": False, "frequency_penalty": 1.5,
    }  # fmt: skip
    answer = await cluster.http.post(GENERATE, json={"text": "abcdefghijk", "sampling_params": settings})
    assert answer.status_code == 200, answer.text
    (call,) = cluster.calls()
    sampling = call.request.sampling
    assert (sampling.temperature, sampling.min_tokens, sampling.max_tokens, sampling.seed) == (0.5, 2, 9, 5)
    assert (sampling.ignore_eos, sampling.frequency_penalty) == (True, 1.5)
    assert sampling.HasField("top_k") and sampling.top_k == 0, "all tokens are kept, whatever the model's default"
    assert cluster.tokenizer.grammars[-1].grammar.regex == "[a-z]+"
    for worker in cluster.workers:
        worker.script.tokens = lambda prompt: [BOS, *encode("ab")[1:]]
    for skips, text in ((True, "ab"), (False, "<2>ab")):
        asked = {"text": "x", "sampling_params": {"skip_special_tokens": skips}}
        assert (await cluster.http.post(GENERATE, json=asked)).json()["text"] == text


WRONG = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"text": 5}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[5], ["a"]]}, "input_ids[1]"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"text": "a", "sampling_params": []}, "sampling_params"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": False}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
    ({"text": "a", "return_logprob": True, "stream": True, "logprob_start_len": 0}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "sampling_params": {"min_new_tokens": -1}}, "sampling_params.min_new_tokens"),
    ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
    ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"text": "a", "sampling_params": {"stop": ""}}, "sampling_params.stop"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
    ({"text": "a", "sampling_params": {"regex": "bad"}}, "sampling_params.regex"),
    ({"text": ["a", "b"], "stream": True}, "stream"),
    ({"text": "a", "streams": True}, "streams"),
    *(({"text": "a", name: "wanted"}, name) for name in NEUTRAL),
    *(({"text": "a", "sampling_params": {name: "x"}}, f"sampling_params.{name}") for name in SETTINGS_NEUTRAL),
]


async def test_a_wrong_parameter_is_named(strict) -> None:
    for body, param in WRONG:
        answer = await strict.http.post(GENERATE, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    settings = {name: values[0] for name, values in SETTINGS_NEUTRAL.items() if values}
    body = {"text": "a", **dict.fromkeys(NEUTRAL), **neutral, "sampling_params": settings}
    assert (await strict.http.post(GENERATE, json=body)).status_code == 200


async def test_no_value_of_any_parameter_is_the_servers_fault(cluster) -> None:
    junk = [{"x": 1}, [[]], 1.5, "", -1, 2**70, True, [1, "a"]]
    for name in GenerateRequest.__struct_fields__:
        for value in junk:
            body = json.dumps({"text": "hi", "sampling_params": {"max_new_tokens": 1}, name: value})
            answer = await cluster.http.post(GENERATE, content=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
    await cluster.idle()


async def test_a_client_that_leaves_ends_the_request(cluster) -> None:
    for worker in cluster.workers:
        worker.script.gate, worker.script.gate_after = asyncio.Event(), 1
    async with cluster.http.stream("POST", GENERATE, json={"text": "abc", "stream": True}) as answer:
        assert '"text":"a"' in await anext(answer.aiter_text())
    await cluster.idle()
    assert [call.outcome for call in cluster.calls()] == ["cancelled"]


async def test_the_model_is_named_and_the_cache_flushed(cluster) -> None:
    for path in ("/get_model_info", "/model_info"):
        found = (await cluster.http.get(path)).json()
        assert found == {"model_path": "fake", "tokenizer_path": "fake", "is_generation": True}
    body = {"text": "a prompt of several pages", "sampling_params": {"max_new_tokens": 1}}

    async def cached() -> int:
        return sum(
            [(await cluster.http.post(GENERATE, json=body)).json()["meta_info"]["cached_tokens"] for _ in range(3)]
        )

    assert await cached() > 0
    foreign = await cluster.http.post("/flush_cache", headers={"origin": "https://evil.example"})
    assert (foreign.status_code, (await cluster.http.get("/flush_cache")).status_code) == (403, 405)
    answer = await cluster.http.post("/flush_cache")
    assert (answer.status_code, answer.text[:13]) == (200, "Cache flushed")
    assert not any(worker._seen_pages for worker in cluster.workers)


async def test_where_operators_have_a_port_of_their_own_no_client_flushes(make_cluster, tmp_path) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)}\n")
    async with make_cluster(1, api_keys=path) as cluster:
        headers = {"authorization": f"Bearer {key}"}
        assert (await cluster.http.post("/flush_cache", headers=headers)).status_code == 403
        assert (await cluster.http.post(GENERATE, json={"text": "a"})).status_code == 401


def test_the_documentation_names_what_is_not_served() -> None:
    text = (Path(__file__).parents[4] / "docs" / "clients.md").read_text()
    (row,) = re.findall(r"^\| the same: `/generate` \|(.*)\|$", text, re.M)
    assert {*re.findall(r"`(\w+)`", row)} == {*NEUTRAL, *SETTINGS_NEUTRAL}


async def test_what_all_texts_share_is_read_once_and_each_has_a_seed_of_its_own(cluster, monkeypatch) -> None:
    read = []

    def count(*args, **kwargs):
        read.append(args)
        return sampling_of(*args, **kwargs)

    monkeypatch.setattr(request, "sampling_of", count)
    body = {"text": ["hi"] * 100, "sampling_params": {"max_new_tokens": 1, "allowed_token_ids": list(range(1000))}}
    answer = await cluster.http.post("/generate", json=body)
    assert len(answer.json()) == 100
    assert len(read) == 1
    assert len({call.request.sampling.seed for call in cluster.calls()}) == 100
    body["sampling_params"]["sampling_seed"] = 7
    await cluster.http.post("/generate", json=body)
    assert [call.request.sampling.seed for call in cluster.calls()].count(7) == 100


async def test_details_of_log_probabilities_that_nobody_wants_say_nothing(cluster) -> None:
    details = {"logprob_start_len": 0, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    for wanted in ({}, {"return_logprob": False}):
        answer = await cluster.http.post(GENERATE, json={"text": "hi", **details, **wanted})
        assert answer.status_code == 200, answer.text
        assert "logprobs" not in answer.text
    assert not any(call.request.sampling.HasField("logprobs") for call in cluster.calls())


async def test_token_healing_with_a_grammar_and_a_stop_regex_are_refused_by_their_full_names(cluster) -> None:
    for settings, name in (
        ({"token_healing": True, "regex": "a"}, "sampling_params.token_healing"),
        ({"token_healing": True, "ignore_eos": True}, "sampling_params.token_healing"),
        ({"token_healing": "yes"}, "sampling_params.token_healing"),
        ({"stop_regex": "(a+)+b"}, "sampling_params.stop_regex"),
    ):
        answer = await cluster.http.post(GENERATE, json={"text": "abc", "sampling_params": settings})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
