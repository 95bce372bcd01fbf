"""The requests whose answers are recorded: a name, how the worker answers, and what is asked over HTTP/1.1 or gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from sapwood.v1 import common_pb2, router_pb2
from sapwood_testing.router.fake_tokenizer import encode

PLAIN = "Hi, wörld."
"""What the model answers unless a case has another text."""
THINKS = '<think>hm, so</think>Sure. <call f>{"city": "Rome"}</call> <call g>{}</call>'
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPENAI_TOOLS = [{"type": "function", "function": {"name": name, "parameters": TOOL}} for name in "fg"]


@dataclass(frozen=True, slots=True)
class Http:
    """A request over HTTP/1.1; ``leaves`` is set where the client closes the connection at the first byte of the body."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: tuple[str, ...] = ()
    answer: str = PLAIN
    labels: tuple[str, ...] = ()
    leaves: bool = False
    fails_after: int | None = None


@dataclass(frozen=True, slots=True)
class Grpc:
    """A call of the router's gRPC service."""

    name: str
    method: str
    request: Message = field(default_factory=router_pb2.ListModelsRequest)
    answer: str = PLAIN


def _both(name: str, path: str, body: dict[str, Any], **more: Any) -> Iterator[Http]:
    yield Http(name, path, body, **more)
    yield Http(f"{name}, streamed", path, {**body, "stream": True}, **more)


def _openai() -> Iterator[Http]:
    path = "/v1/completions"
    body = {"model": "fake", "prompt": "Hello", "seed": 1}
    yield from _both("completion", path, body)
    yield from _both("completion of two prompts, two choices each", path, {**body, "prompt": ["ab", "cd"], "n": 2})
    yield from _both("completion with log probabilities and echo", path, {**body, "logprobs": 2, "echo": True})
    yield from _both(
        "completion of token ids, cut by max_tokens", path, {**body, "prompt": encode("abc"), "max_tokens": 3}
    )
    yield from _both("completion that a stop string ends", path, {**body, "stop": ["wö"]})
    yield Http("completion without a prompt", path, {"model": "fake"})
    yield Http("completion of a model that is not there", path, {**body, "model": "nobody"})
    yield Http("completion with a wrong type", path, {**body, "temperature": "warm"})
    yield Http("completion with a value out of range", path, {**body, "top_p": 2})
    yield Http("completion that is no JSON", path, b"{")
    yield Http("completion by GET", path, method="GET")
    yield Http("completion that the client leaves", path, {**body, "stream": True}, leaves=True)
    yield from _both("completion that the worker refuses", path, body, fails_after=0)
    yield from _both("completion that the worker breaks off", path, body, fails_after=2)

    path = "/v1/chat/completions"
    body = {"model": "fake", "messages": TURNS, "seed": 1}
    yield from _both("chat", path, body)
    yield from _both("chat with tools and reasoning", path, {**body, "tools": OPENAI_TOOLS}, answer=THINKS)
    yield from _both(
        "chat with log probabilities", path, {**body, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
    )
    yield from _both("chat with two choices", path, {**body, "n": 2})
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOL}}
    yield from _both("chat with a schema", path, {**body, "response_format": schema}, answer='{"city": "Rome"}')
    yield Http("chat with usage, streamed", path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 C"},
    ]  # fmt: skip
    yield Http("chat with a history of calls", path, {**body, "messages": history, "tools": OPENAI_TOOLS})
    yield Http("chat without messages", path, {"model": "fake", "messages": []})
    yield Http("chat with an unknown role", path, {**body, "messages": [{"role": "wizard", "content": "x"}]})
    yield Http(
        "chat with a bad schema",
        path,
        {**body, "response_format": {**schema, "json_schema": {"name": "a", "schema": {"bad": 1}}}},
    )

    path = "/v1/embeddings"
    yield Http("embedding", path, {"model": "fake", "input": "abc"})
    yield Http("embeddings as base64", path, {"model": "fake", "input": ["a", "bc"], "encoding_format": "base64"})
    yield Http("embedding of nothing", path, {"model": "fake", "input": []})
    yield Http("models", "/v1/models", method="GET")
    yield Http("model", "/v1/models/fake", method="GET")
    yield Http("model that is not there", "/v1/models/nobody", method="GET")
    yield Http("route that is not there", "/v1/nothing", method="GET")


def _responses() -> Iterator[Http]:
    path = "/v1/responses"
    body = {"model": "fake", "input": "Hello", "store": False}
    yield from _both("response", path, body)
    tools = [{"type": "function", "name": name, "parameters": TOOL} for name in "fg"]
    yield from _both("response with tools and reasoning", path, {**body, "tools": tools}, answer=THINKS)
    yield from _both("response cut by max_output_tokens", path, {**body, "max_output_tokens": 3})
    yield Http("response with a wrong input", path, {**body, "input": 5})
    yield Http("response that is not kept", f"{path}/resp_nothing", method="GET")
    yield from _both("response that the worker breaks off", path, body, fails_after=2)


def _anthropic() -> Iterator[Http]:
    path = "/v1/messages"
    body = {"model": "fake", "max_tokens": 100, "system": "Be brief.", "messages": TURNS[1:]}
    yield from _both("message", path, body)
    tools = [{"name": name, "input_schema": TOOL} for name in "fg"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {**body, "tools": tools, "max_tokens": 2000, "thinking": thinking}
    yield from _both("message with tools and thinking", path, asked, answer=THINKS)
    yield from _both("message that a stop sequence ends", path, {**body, "stop_sequences": ["wö"]})
    yield Http("message without max_tokens", path, {"model": "fake", "messages": TURNS[1:]})
    yield Http("message of a model that is not there", path, {**body, "model": "nobody"})
    yield Http("count of a message's tokens", f"{path}/count_tokens", {"model": "fake", "messages": TURNS[1:]})
    yield from _both("message that the worker breaks off", path, body, fails_after=2)


def _others() -> Iterator[Http]:
    body = {"text": "Hello", "rid": "mine", "sampling_params": {"max_new_tokens": 8, "sampling_seed": 1}}
    yield from _both("SGLang's generate", "/generate", body)
    asked = {**body, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    yield from _both("SGLang's generate with log probabilities", "/generate", asked)
    yield Http("SGLang's generate of nothing", "/generate", {"sampling_params": {}})
    yield Http("score", "/v1/score", {"model": "fake", "text_1": "ab", "text_2": ["c", "defg"]})
    yield Http("rerank", "/v1/rerank", {"query": "a", "documents": ["zzzz", "b"], "top_n": 1})
    yield Http("rerank of nothing", "/v1/rerank", {"query": "a"})
    yield Http("classification", "/v1/classify", {"model": "fake", "input": ["ab", "c"]}, labels=("low", "high", "odd"))
    yield Http("tokens of a text", "/tokenize", {"prompt": "abc"})
    yield Http("text of tokens", "/detokenize", {"tokens": encode("abc")})
    yield Http("health", "/health", method="GET")
    yield Http("session that is not there", "/v1/sessions/nothing", method="GET")
    yield Http("session, opened", "/v1/sessions", {"ttl_seconds": 60})


def _turns() -> router_pb2.ChatMessages:
    return router_pb2.ChatMessages(
        messages=[common_pb2.ChatMessage(role=turn["role"], content=turn["content"]) for turn in TURNS]
    )


def _grpc() -> Iterator[Grpc]:
    ask = router_pb2.RouterGenerateRequest
    sampling = common_pb2.SamplingParams(max_tokens=20, seed=1)
    tools = json.dumps(OPENAI_TOOLS)
    yield Grpc("text", "Generate", ask(text="Hello", sampling=sampling))
    yield Grpc(
        "two choices", "Generate", ask(text="Hello", sampling=common_pb2.SamplingParams(max_tokens=20, seed=1, n=2))
    )
    yield Grpc("token ids", "Generate", ask(tokens=common_pb2.TokenIds(ids=encode("abc")), sampling=sampling))
    logprobs = common_pb2.SamplingParams(max_tokens=3, seed=1, logprobs=1, prompt_logprobs=1)
    yield Grpc("log probabilities", "Generate", ask(text="ab", sampling=logprobs))
    yield Grpc("tools and reasoning", "Generate", ask(messages=_turns(), tools=tools), answer=THINKS)
    yield Grpc("a value out of range", "Generate", ask(text="a", sampling=common_pb2.SamplingParams(top_p=2)))
    yield Grpc("no prompt", "Generate", ask())
    yield Grpc("a model that is not there", "Generate", ask(text="a", model="nobody"))
    yield Grpc("models", "ListModels")
    yield Grpc(
        "embeddings",
        "Embed",
        router_pb2.RouterEmbedRequest(input=[router_pb2.EmbedInput(text=text) for text in ("ab", "c")]),
    )
    yield Grpc("a session that is not there", "GetSession", router_pb2.GetSessionRequest(id="nothing"))


HTTP: dict[str, list[Http]] = {
    "openai": list(_openai()),
    "responses": list(_responses()),
    "anthropic": list(_anthropic()),
    "others": list(_others()),
}
GRPC = list(_grpc())
