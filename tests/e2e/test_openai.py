"""The OpenAI API, used with the official client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

PROMPT = "The capital of France is"
CONTINUATION = " the capital of the country of France."


@pytest.fixture
def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=120)


def test_a_completion_continues_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=9, temperature=0)
    assert answer.choices[0].text.startswith(CONTINUATION)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "demo"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 9, 15)


def test_a_stream_joins_to_the_whole_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=0)
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len(chunks) > 3
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Name three colours."}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answer.choices[0].message.content


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=32, temperature=0, stop=["country"])
    assert answer.choices[0].text == " the capital of the "
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_gives_its_text_again(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, temperature=1, seed=seed)
        return answer.choices[0].text

    first = text(7)
    with ThreadPoolExecutor(4) as pool:  # in whatever company
        same, other, again, _ = pool.map(text, (7, 8, 7, 9))
    assert same == again == first != other


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["demo"]


def test_health_is_ok_and_the_request_id_comes_back(cluster: Any) -> None:
    assert httpx.get(f"http://{cluster.http}/health").status_code == 200
    answer = httpx.post(
        f"http://{cluster.http}/v1/completions",
        json={"model": "demo", "prompt": PROMPT, "max_tokens": 1},
        headers={"x-request-id": "end-to-end-1"},
        timeout=60,
    )
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "end-to-end-1"


def test_the_stream_is_server_sent_events_that_end_with_done(cluster: Any) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"http://{cluster.http}/v1/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])


def test_tokens_have_their_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert "".join(found.tokens) == answer.choices[0].text
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs or (), strict=True):
        assert logprob is not None and logprob <= 0
        assert max(top.values()) == top[token] == logprob  # greedy takes the likeliest
    echoed = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert echoed.choices[0].text == PROMPT
    tokens = echoed.choices[0].logprobs
    assert tokens is not None and tokens.tokens is not None and tokens.token_logprobs is not None
    assert "".join(tokens.tokens[1:]) == PROMPT
    assert tokens.token_logprobs[0] is None and all(value is not None for value in tokens.token_logprobs[1:])
    messages: Any = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content
    assert b"".join(bytes(item.bytes or ()) for item in content).decode() == chat.choices[0].message.content
    assert all(len(item.top_logprobs) == 2 for item in content)


def test_continuations_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=12, temperature=1, seed=3, n=3
        )
        return [choice.text for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_bias_and_a_minimum_are_kept(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="demo", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=1)
    found = plain.choices[0].logprobs
    assert found is not None and found.tokens is not None
    biased = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=8, temperature=0, logit_bias={"2": -100, "1": 100}
    )
    assert biased.choices[0].text == ""  # 1 is the end token
    held = client.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        logit_bias={"1": 100},
        extra_body={"min_tokens": 3},
    )
    assert held.usage is not None
    assert held.usage.completion_tokens == 4


def test_bad_words_do_not_come_and_only_allowed_tokens_do(client: openai.OpenAI) -> None:
    def ask(**extra: Any) -> Any:
        return client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=9, temperature=0, extra_body={"return_token_ids": True, **extra}
        ).choices[0]

    plain: Any = ask()
    assert plain.text.startswith(CONTINUATION)
    without = ask(bad_words=["the capital of", "France"])
    assert "the capital of" not in without.text and "France" not in without.text
    assert without.text.startswith(" the capital")  # only the last word of the three was in the way
    allowed = sorted({*plain.token_ids[:3], 1000, 2000})
    held = ask(allowed_token_ids=allowed)
    assert held.token_ids[:3] == plain.token_ids[:3]
    assert set(held.token_ids) <= set(allowed)
    grammar = ask(structured_outputs={"regex": "[a-z ]{1,40}"}, bad_words=["capital"])
    assert "capital" not in grammar.text and set(grammar.text) <= set("abcdefghijklmnopqrstuvwxyz ")


def test_vllms_parameters_hold_with_a_model(client: openai.OpenAI) -> None:
    found: Any = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, temperature=0,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True, "truncate_prompt_tokens": 4},
    ).choices[0]  # fmt: skip
    assert len(found.prompt_token_ids) == 4
    assert found.prompt_logprobs[0] is None
    again: Any = client.completions.create(  # from the prefix cache, as far as that may be
        model="demo", prompt=PROMPT, max_tokens=4, temperature=0,
        extra_body={"prompt_logprobs": 1, "truncate_prompt_tokens": 4},
    ).choices[0]  # fmt: skip
    for token, one, other in zip(
        found.prompt_token_ids[1:], found.prompt_logprobs[1:], again.prompt_logprobs[1:], strict=True
    ):
        assert one[str(token)]["logprob"] == pytest.approx(other[str(token)]["logprob"], abs=1e-4)
        assert one.keys() == other.keys()
    choice = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=9, extra_body={"guided_choice": ["Paris", "Rome"]}
    )
    assert choice.choices[0].text in ("Paris", "Rome")
    best = client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, n=1, best_of=3, seed=1, temperature=1)
    assert len(best.choices) == 1
    assert best.usage is not None and best.usage.completion_tokens > 4
    messages: Any = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    gone_on = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=4, temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    assert "three" in (gone_on.choices[0].message.content or "")
    huge = client.completions.create(model="demo", prompt=PROMPT, max_tokens=10**6, stop=["country"], temperature=0)
    assert huge.choices[0].text == " the capital of the "


def test_texts_are_embedded(client: openai.OpenAI) -> None:
    texts = ["A cat sits on the mat.", "A kitten lies on the rug.", "def f(x): return x ** 2"]
    answer = client.embeddings.create(model="demo", input=texts)
    vectors = [item.embedding for item in answer.data]
    assert {len(vector) for vector in vectors} == {640}

    def likeness(a: int, b: int) -> float:
        return sum(x * y for x, y in zip(vectors[a], vectors[b], strict=True))

    assert all(abs(likeness(index, index) - 1) < 1e-3 for index in range(3))
    assert likeness(0, 1) > likeness(0, 2)
    assert client.embeddings.create(model="demo", input=texts[0]).data[0].embedding == pytest.approx(
        vectors[0], abs=1e-4
    )
