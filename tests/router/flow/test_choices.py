"""Several continuations, probabilities of tokens, echoed prompts and all that adjusts the choice of tokens."""

import asyncio
from array import array

import grpc
import pytest

from sapwood.v1 import common_pb2, router_pb2
from sapwood_net.http2.server.turnstile import MOST_A_TURN
from sapwood_net.pacing.heavy_work import A_FEW
from sapwood_router.flow import generation
from sapwood_router.flow.generation import Generation, Pipeline
from sapwood_testing.router.fake_tokenizer import BOS, encode

HI = [{"role": "user", "content": "hi"}]
TEXT = "aé🌲"  # tokens are bytes: the last characters are of two and of four
IDS = [token for token in encode(TEXT) if token != BOS]
TOKENS = ["a", *["\ufffd"] * 6]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def one(make_cluster):
    async with make_cluster(workers=1) as cluster:
        yield cluster


async def test_each_continuation_is_a_choice_and_the_prompt_counts_once(one) -> None:
    answer = await one.openai.chat.completions.create(model="fake", messages=HI, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    prompt = len(one.calls()[0].request.token_ids)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [texts[0]] * 3
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == sum(call.sent_tokens for call in one.calls())
    assert sorted(call.request.sampling.seed for call in one.calls()) == [7, 8, 9]
    stream = await one.openai.chat.completions.create(
        model="fake", messages=HI, n=2, stream=True, stream_options={"include_usage": True}
    )
    parts = ["", ""]
    ends = set()
    async for chunk in stream:
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            ends |= {choice.index} if choice.finish_reason else set()
        usage = chunk.usage
    assert (parts, ends) == ([texts[0]] * 2, {0, 1})
    assert usage.prompt_tokens == prompt
    assert len({call.request.sampling.seed for call in one.calls()[-2:]}) == 2


async def test_many_continuations_begin_in_several_turns_of_the_loop(one, monkeypatch) -> None:
    begun, turns = [], []
    begin = Generation._first_try

    def start(attempts: Generation) -> None:
        loop = asyncio.get_running_loop()
        if not begun or begun[-1] != len(turns):
            loop.call_soon(turns.append, None)
        begun.append(len(turns))
        begin(attempts)

    monkeypatch.setattr(Generation, "_first_try", start)
    answer = await one.openai.chat.completions.create(model="fake", messages=HI, n=100)
    assert [choice.index for choice in answer.choices] == list(range(100))
    assert len(begun) == 100
    assert max(map(begun.count, begun)) <= 2 * MOST_A_TURN  # a round may come before its turn's mark


async def test_many_prompts_are_opened_and_prepared_a_few_a_turn_of_the_loop(one, monkeypatch) -> None:
    turns: list[None] = []
    done: dict[str, list[int]] = {"opened": [], "prepared": []}

    def counted(what: str, work):
        def call(*args):
            if not done[what] or done[what][-1] != len(turns):
                asyncio.get_running_loop().call_soon(turns.append, None)
            done[what].append(len(turns))
            return work(*args)

        return call

    monkeypatch.setattr(Pipeline, "open", counted("opened", Pipeline.open))
    monkeypatch.setattr(generation, "prepare", counted("prepared", generation.prepare))
    prompts = [f"prompt {number}" for number in range(5 * A_FEW)]
    answer = await one.openai.completions.create(model="fake", prompt=prompts)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(prompts))
    for turn in done.values():
        assert len(turn) == len(prompts)
        assert max(map(turn.count, turn)) <= A_FEW
    await one.idle()


async def test_the_continuations_of_several_prompts_come_together(one) -> None:
    answer = await one.openai.completions.create(model="fake", prompt=["ab", "xyz"], n=2, best_of=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ab"), (1, "ab"), (2, "xyz"), (3, "xyz")]
    assert answer.usage.prompt_tokens == len(encode("ab")) + len(encode("xyz"))
    await one.idle()


async def test_a_chat_has_its_tokens_with_bytes_and_alternatives(one) -> None:
    one.workers[0].script.tokens = lambda prompt: IDS
    answer = await one.openai.chat.completions.create(
        model="fake", messages=HI, logprobs=True, top_logprobs=2, max_tokens=20
    )
    content = answer.choices[0].logprobs.content
    assert [item.token for item in content] == TOKENS  # the end token is none
    assert bytes(byte for item in content for byte in item.bytes).decode() == TEXT
    assert [item.logprob for item in content] == [-token / 8 for token in IDS]
    assert [(other.token, other.logprob, other.bytes) for other in content[0].top_logprobs] == [
        ("a", -IDS[0] / 8, [97]),
        ("b", -(IDS[0] + 1) / 8, [98]),
    ]
    asked = one.tokenizer.vocabularies
    stream = await one.openai.chat.completions.create(model="fake", messages=HI, logprobs=True, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
    streamed = [item for choice in chunks if choice.logprobs for item in choice.logprobs.content or ()]
    assert [(item.token, item.logprob, item.bytes) for item in streamed] == [
        (item.token, item.logprob, item.bytes) for item in content
    ]
    assert not any(item.top_logprobs for item in streamed)
    assert one.tokenizer.vocabularies == asked == 2  # its two parts, once
    plain = await one.openai.chat.completions.create(model="fake", messages=HI)
    assert plain.choices[0].logprobs is None


async def test_tokens_are_told_beside_reasoning_and_calls_too(one) -> None:
    text = "<think>no</think><call f>{}</call>"
    one.workers[0].script.tokens = lambda prompt: encode(text)[1:]
    tools = [{"type": "function", "function": {"name": "f"}}]
    stream = await one.openai.chat.completions.create(
        model="fake", messages=HI, tools=tools, logprobs=True, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
    streamed = [item.token for choice in chunks if choice.logprobs for item in choice.logprobs.content or ()]
    assert "".join(streamed) == text


async def test_a_completion_has_parallel_lists_with_offsets(one) -> None:
    one.workers[0].script.tokens = lambda prompt: IDS
    answer = await one.openai.completions.create(model="fake", prompt="ab", logprobs=1, max_tokens=20)
    found = answer.choices[0].logprobs
    assert found.tokens == TOKENS
    assert found.token_logprobs == [-token / 8 for token in IDS]
    assert found.top_logprobs[0] == {"a": -IDS[0] / 8}
    assert found.text_offset == [0, 1, 1, 2, 2, 2, 2]
    bare = await one.openai.completions.create(model="fake", prompt="ab", logprobs=0, max_tokens=20)
    assert bare.choices[0].logprobs.top_logprobs[0] == {"a": -IDS[0] / 8}  # the token itself is always there
    stream = await one.openai.completions.create(model="fake", prompt="ab", logprobs=1, max_tokens=20, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    assert [offset for piece in pieces if piece for offset in piece.text_offset] == found.text_offset


@pytest.mark.parametrize("prompt", ["éb", encode("éb")])
async def test_an_echoed_prompt_comes_first_with_its_tokens(one, prompt) -> None:
    one.workers[0].script.tokens = lambda prompt: encode("cd")[1:]
    shown = "éb"
    plain = await one.openai.completions.create(model="fake", prompt=prompt, echo=True)
    assert plain.choices[0].text == shown + "cd"
    answer = await one.openai.completions.create(model="fake", prompt=prompt, echo=True, logprobs=1)
    found = answer.choices[0].logprobs
    assert found.tokens == ["<2>", "\ufffd", "\ufffd", "b", "c", "d"]
    assert found.token_logprobs == [None, *(-token / 8 for token in encode("ébcd")[1:])]
    assert found.top_logprobs[0] is None
    assert found.text_offset == [0, 0, 0, 1, 2, 3]  # the special token has no text
    stream = await one.openai.completions.create(model="fake", prompt=prompt, echo=True, logprobs=1, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == shown + "cd"
    assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens] == found.tokens
    only = await one.openai.completions.create(model="fake", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == shown
    assert only.choices[0].logprobs.tokens == found.tokens[:4]
    assert (only.usage.completion_tokens, only.choices[0].finish_reason) == (0, "length")


async def test_every_adjustment_reaches_the_worker(one) -> None:
    fields = {
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {"5": -100, "7": 1.5},
        "min_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.25, "seed": 5,
    }  # fmt: skip
    for path, prompt in (("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": HI})):
        response = await one.http.post(path, json={**prompt, **fields})
        assert response.status_code == 200, response.text
        sampling = one.calls()[-1].request.sampling
        assert dict(sampling.logit_bias) == {5: -100, 7: 1.5}
        for name in fields.keys() - {"logit_bias"}:
            assert getattr(sampling, name) == fields[name], name
        assert not sampling.HasField("logprobs")
        assert not sampling.HasField("n")


async def test_grpc_gives_choices_logprobs_and_adjustments(one, expect_error) -> None:
    one.workers[0].script.tokens = lambda prompt: IDS
    sampling = common_pb2.SamplingParams(n=2, logprobs=1, prompt_logprobs=0, logit_bias={5: 1}, min_tokens=2)
    responses = await one.generate("ab", sampling=sampling)
    for index in (0, 1):
        own = [response for response in responses if response.index == index]
        assert "".join(response.text for response in own) == TEXT
        assert [response.finish_reason for response in own if response.finish_reason] == [1]
        assert own[-1].usage.prompt_tokens == len(encode("ab"))
        pairs = [(t, p) for r in own for t, p in zip(r.token_ids, r.logprobs, strict=True)]
        assert [(token, found.logprob, list(found.top_ids)) for token, found in pairs] == [
            (token, -token / 8, [token]) for token in [*IDS, 1]
        ]
    prompts = [response.prompt_logprobs for response in responses if response.prompt_logprobs]
    assert [[item.logprob for item in found] for found in prompts] == [[-token / 8 for token in encode("ab")[1:]]]
    for name, value in (
        ("n", 0),
        ("n", 200),
        ("logprobs", 21),
        ("min_tokens", 2**31),
        ("presence_penalty", float("nan")),
    ):
        request = router_pb2.RouterGenerateRequest(text="a", sampling=common_pb2.SamplingParams(**{name: value}))
        assert (await expect_error(one.stub.Generate(request).read(), INVALID))[1] == f"sampling.{name}"
    await one.idle()


async def test_tokens_of_several_prompts_are_arrays(one, monkeypatch) -> None:
    """Of a thousand prompts of 4 KB lists took 37 MB, and ten such requests may be under way."""
    contexts, begin = [], Generation._first_try

    def start(attempts: Generation) -> None:
        contexts.append(attempts.context)
        begin(attempts)

    monkeypatch.setattr(Generation, "_first_try", start)
    prompts = [f"prompt {number}" for number in range(4)]
    answer = await one.openai.completions.create(model="fake", prompt=prompts, echo=True, max_tokens=1)
    assert [choice.text.startswith(prompt) for choice, prompt in zip(answer.choices, prompts, strict=True)] == [
        True
    ] * 4
    assert sorted(isinstance(context.token_ids, array) for context in contexts) == [False, True, True, True]
    assert sorted(list(context.token_ids) for context in contexts) == sorted(map(encode, prompts))
