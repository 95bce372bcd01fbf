"""The client over the wire, against a scripted router."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import grpc
import pytest

from sapwood import client as sapwood_client
from sapwood.client import AsyncClient, Client, Delta, ToolCall, Usage
from sapwood.v1 import common_pb2, router_pb2, worker_pb2
from sapwood_common import errors


def test_deltas_arrive_in_order_and_the_last_has_reason_and_usage(router: Any) -> None:
    with Client(router.address) as client:
        deltas = list(client.generate("Hi"))
    assert [delta.text for delta in deltas] == ["Hello", ", ", "world", ""]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,), ()]
    assert deltas[0] == Delta("Hello", (0,))
    assert deltas[-1] == Delta("", (), "stop", Usage(5, 3, 4), "\n")


async def test_the_async_client_gives_the_same_deltas(router: Any) -> None:
    async with AsyncClient(router.address) as client:
        deltas = [delta async for delta in client.generate("Hi")]
        assert await client.generate("Hi").text() == "Hello, world"
    with Client(router.address) as blocking:
        assert deltas == list(blocking.generate("Hi"))


def test_each_kind_of_prompt_and_each_option_reaches_the_router(router: Any) -> None:
    with Client(router.address) as client:
        client.generate(
            token_ids=[2, 818],
            model="demo",
            temperature=0.0,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            seed=0,
            max_tokens=7,
            stop_token_ids=[1],
            ignore_eos=True,
            stop="\n",
            skip_special_tokens=False,
            include_stop=True,
            request_id="mine",
            truncate_prompt_tokens=9,
            bad_words=["no"],
            bad_words_ids=[[1], [2, 3]],
            allowed_token_ids=[5],
            truncate_right=True,
        ).text()
        turns = [{"role": "user", "content": "Hi"}]
        client.generate(
            messages=turns, stop=["a", "b"], continue_final_message=True, add_generation_prompt=False
        ).text()
        client.generate("text", suffix="after", whole=True, add_special_tokens=False).text()
    tokens, chat, text = router.requests
    assert list(tokens.tokens.ids) == [2, 818]
    assert (tokens.model, tokens.request_id, tokens.skip_special_tokens) == ("demo", "mine", False)
    assert (list(tokens.stop), tokens.include_stop, text.include_stop) == (["\n"], True, False)
    sampling = tokens.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 5, 0.5, 0)
    assert (sampling.max_tokens, list(sampling.stop_token_ids), sampling.ignore_eos) == (7, [1], True)
    assert sampling.HasField("temperature") and sampling.HasField("seed")
    assert (chat.messages.messages[0].role, chat.messages.messages[0].content) == ("user", "Hi")
    assert list(chat.stop) == ["a", "b"]
    assert (chat.continue_final_message, chat.add_generation_prompt, chat.HasField("add_generation_prompt")) == (
        True, False, True,
    )  # fmt: skip
    assert (tokens.truncate_prompt_tokens, tokens.truncate_right) == (9, True)
    assert not text.HasField("truncate_prompt_tokens")
    assert list(tokens.bad_words) == ["no"]
    assert [list(sequence.ids) for sequence in sampling.bad_words_ids] == [[1], [2, 3]]
    assert list(sampling.allowed_token_ids) == [5]
    assert (text.text, text.suffix, tokens.suffix, text.whole, tokens.whole) == ("text", "after", "", True, False)
    assert text.HasField("add_special_tokens") and not text.add_special_tokens
    assert not tokens.HasField("add_special_tokens")
    assert not text.sampling.HasField("temperature")
    assert not text.HasField("model")


def test_not_exactly_one_prompt_is_refused_before_it_is_sent(router: Any) -> None:
    with Client(router.address) as client:
        with pytest.raises(ValueError, match="exactly one"):
            client.generate()
        with pytest.raises(ValueError, match="exactly one"):
            client.generate("text", token_ids=[1])
        with pytest.raises(ValueError):
            client.generate("text", seed=-1)
    assert router.requests == []


def test_a_misspelt_option_is_refused_before_it_is_sent(router: Any) -> None:
    misspelt: Any = {"max_tokns": 3}
    strange: Any = {"colour": 1}
    with Client(router.address) as client:
        with pytest.raises(ValueError, match=r"'max_tokns'; max_tokens\?"):
            client.generate("text", **misspelt)
        with pytest.raises(ValueError, match=r"no option 'colour'; help\(sapwood.generation.Options\) lists them$"):
            client.generate("text", **strange)
    assert router.requests == []


def test_what_is_no_message_is_refused_before_it_is_sent(router: Any) -> None:
    text: Any = "How warm is it?"
    with Client(router.address) as client:
        with pytest.raises(TypeError, match=r"^messages: .* it takes a list"):
            client.generate(messages=text)
        with pytest.raises(ValueError, match=r"messages\[0\].role is required"):
            client.generate(messages=[{"content": "How warm is it?"}])
    assert router.requests == []


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("max_tokens", "x", TypeError),
        ("temperature", "hot", TypeError),
        ("logit_bias", {"x": 1}, TypeError),
        ("stop", 5, TypeError),
        ("bad_words_ids", [["a"]], TypeError),
        ("model", 3, TypeError),
    ],
)
def test_a_value_that_its_option_cannot_have_names_the_option(
    router: Any, option: str, value: Any, error: type[Exception]
) -> None:
    with Client(router.address) as client, pytest.raises(error, match=f"^{option}: .* cannot be its value"):
        client.generate("text", **{option: value})
    assert router.requests == []


def test_a_prompt_that_is_no_text_is_named(router: Any) -> None:
    number: Any = 5
    with Client(router.address) as client:
        with pytest.raises(TypeError, match=r"^text: 5 is no text"):
            client.generate(number)
        with pytest.raises(TypeError, match=r"^token_ids: "):
            client.generate(token_ids=["a"])  # type: ignore[list-item]


def test_the_url_of_an_http_port_is_explained() -> None:
    with pytest.raises(
        ValueError, match=r"address: http://a:1 is a URL; this takes the router's gRPC address, HOST:PORT"
    ):
        Client("http://a:1")


def test_an_error_after_some_text_keeps_the_text_and_raises_its_class(router: Any) -> None:
    router.error = errors.ResourceExhaustedError("the queue is full", retry_after=1.5)
    with Client(router.address) as client:
        generation = client.generate("Hi", request_id="r-1")
        assert [next(generation).text for _ in router.pieces] == ["Hello", ", ", "world"]
        with pytest.raises(sapwood_client.ResourceExhaustedError) as caught:
            next(generation)
    assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (caught.value.retry_after, caught.value.request_id) == (1.5, "r-1")


async def test_the_async_client_raises_the_same_errors(router: Any) -> None:
    router.error = errors.InvalidArgumentError("too hot", field="sampling.temperature")
    async with AsyncClient(router.address) as client:
        with pytest.raises(sapwood_client.InvalidArgumentError) as caught:
            await client.generate("Hi", request_id="r-2").text()
        assert (caught.value.field, caught.value.request_id) == ("sampling.temperature", "r-2")
        with pytest.raises(sapwood_client.InvalidArgumentError):
            await client.list_models()


def test_leaving_the_with_block_cancels_the_call(router: Any) -> None:
    router.hang = True
    with Client(router.address) as client, client.generate("Hi") as generation:
        assert next(generation).text == "Hello"
        assert generation.request_id == "made-here"
    assert router.cancelled.wait(60)


async def test_leaving_the_async_with_block_cancels_the_call(router: Any) -> None:
    router.hang = True
    async with AsyncClient(router.address) as client:
        async with client.generate("Hi") as generation:
            assert (await anext(generation)).text == "Hello"
            assert await generation.request_id() == "made-here"
        assert await asyncio.to_thread(router.cancelled.wait, 60)


def test_a_timeout_is_a_deadline_exceeded_error(router: Any) -> None:
    router.hang = True
    for seconds in (0.3, 3, 30):  # where the machine is slow, the first may pass before the router hears of it
        with Client(router.address, timeout=seconds) as client, pytest.raises(sapwood_client.DeadlineExceededError):
            client.generate("Hi").text()
        if router.requests:
            break
    assert router.cancelled.wait(60)


def test_no_router_is_unavailable(free_port: int) -> None:
    with Client(f"127.0.0.1:{free_port}") as client:
        with pytest.raises(sapwood_client.UnavailableError):
            client.generate("Hi").text()
        with pytest.raises(sapwood_client.UnavailableError):
            client.list_workers()


def test_models_and_workers_are_listed(router: Any) -> None:
    with Client(router.address) as client:
        assert client.list_models() == [sapwood_client.Model("demo", 99, 2)]
        assert client.list_workers() == [sapwood_client.WorkerStatus("a:1", True, "demo", 3, 2, 1, 7, 8)]


def test_the_address_comes_from_the_variable(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_ROUTER", router.address)
    with Client() as client:
        assert client.generate("Hi").text() == "Hello, world"


def test_the_client_and_its_verbs_load_only_grpcio_and_protobuf() -> None:
    program = """
import sys
class OnlyTheBaseInstall:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = top in sys.stdlib_module_names or top in ("sapwood", "grpc", "google", "cygrpc", "typing_extensions")
        # In the wheel, and they need nothing themselves.
        needs_nothing = (
            "", ".settings", ".settings.flags", ".contract", ".contract.limits", ".models", ".models.packaged",
            ".models.progress", ".python_process", ".telemetry", ".telemetry.shown_text",
        )
        if not allowed and name.removeprefix("sapwood_common") not in needs_nothing:
            raise ModuleNotFoundError(f"not in the base install: {name}")
sys.meta_path.insert(0, OnlyTheBaseInstall())
import sapwood.client, sapwood.cli.main
try:
    sapwood.cli.main.main(["generate", "--address", "127.0.0.1:1", "--timeout", "5", "text"])
finally:
    assert not any(name.startswith("google.rpc") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("sapwood: no router answers at 127.0.0.1:1: connection refused; `sapwood up`")


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Ä"}}]


def test_tools_grammars_and_adjustments_reach_the_router(router: Any) -> None:
    with Client(router.address) as client:
        client.generate(
            messages=[{"role": "user", "content": "Hi"}],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            json_schema=SCHEMA,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=2,
            logit_bias={5: -1},
            min_tokens=2,
            n=2,
            logprobs=0,
            prompt_logprobs=3,
        ).text()
        client.generate("x", regex="a+").text()
        client.generate("x", ebnf="root ::= 'a'").text()
        client.generate("x", structural_tag={"format": {"type": "any_text"}}).text()
        client.generate("x", tool_choice_function="f").text()
        for wrong in ({"regex": "a", "ebnf": "b"}, {"tool_choice": "f"}):
            with pytest.raises(ValueError, match=r"regex and ebnf|tool_choice"):
                client.generate("x", **wrong)  # type: ignore[misc]
    first, *others = router.requests
    assert json.loads(first.tools) == TOOLS
    assert (first.tool_choice, first.parallel_tool_calls) == (router_pb2.TOOL_CHOICE_REQUIRED, False)
    assert first.grammar.json_schema == json.dumps(SCHEMA)
    sampling = first.sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 2)
    assert (dict(sampling.logit_bias), sampling.min_tokens, sampling.n) == ({5: -1}, 2, 2)
    assert (sampling.HasField("logprobs"), sampling.prompt_logprobs) == (True, 3)
    kinds = [request.grammar.WhichOneof("grammar") for request in others]
    assert kinds == ["regex", "ebnf", "structural_tag", None]
    assert others[-1].tool_choice_function == "f"
    assert not others[0].HasField("parallel_tool_calls")


def calling() -> tuple[Any, ...]:
    call = common_pb2.ToolCallDelta
    return (
        router_pb2.RouterGenerateResponse(reasoning="Hm. "),
        router_pb2.RouterGenerateResponse(reasoning="So.", tool_calls=[call(index=0, id="c0", name="f")]),
        router_pb2.RouterGenerateResponse(
            tool_calls=[call(index=0, arguments='{"a"'), call(index=1, id="c1", name="g", arguments="{}")]
        ),
        router_pb2.RouterGenerateResponse(
            tool_calls=[call(index=0, arguments=": 1}")],
            token_ids=[7],
            logprobs=[worker_pb2.TokenLogprobs(logprob=-0.5, top_ids=[7, 8], top_logprobs=[-0.5, -1])],
        ),
    )


async def test_an_answer_has_its_calls_whole_and_is_the_next_requests_turn(router: Any) -> None:
    router.extra = calling()
    with Client(router.address) as client:
        deltas = list(client.generate("x"))
        answer = client.generate("x").answer()
    async with AsyncClient(router.address) as asynchronous:
        assert await asynchronous.generate("x").answer() == answer
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Hello, world", "Hm. So.", "stop")
    assert answer.tool_calls == (ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "{}"))
    assert answer.token_ids == (0, 1, 2, 7)
    assert [found.top for delta in deltas for found in delta.logprobs] == [((7, -0.5), (8, -1.0))]
    with Client(router.address) as client:
        tool = {"role": "tool", "content": "1", "tool_call_id": "c0", "name": "f"}
        of_openai = {"id": "c2", "type": "function", "function": {"name": "h", "arguments": "{}"}}
        other = {"role": "assistant", "content": None, "tool_calls": [of_openai]}
        client.generate(messages=[answer.message, tool, other]).text()
    turns = router.requests[-1].messages.messages
    assert [(call.id, call.name, call.arguments) for call in turns[0].tool_calls] == [
        ("c0", "f", '{"a": 1}'),
        ("c1", "g", "{}"),
    ]
    assert (turns[0].reasoning, turns[0].content) == ("Hm. So.", "Hello, world")
    assert (turns[1].tool_call_id, turns[1].name) == ("c0", "f")
    assert (turns[2].tool_calls[0].name, turns[2].HasField("content")) == ("h", False)


async def test_texts_pairs_and_tokens_are_classified(router: Any) -> None:
    with Client(router.address) as client:
        found = client.classify(["a", ("b", "c"), [5, 6]], model="demo", raw=True, truncate_prompt_tokens=-1)
        with pytest.raises(TypeError):
            client.classify([("b", 5)])  # type: ignore[list-item]
    assert (found.scores, found.labels) == (((0.0, 0.5), (1.0, 0.5), (2.0, 0.5)), ("no", "yes"))
    assert (found.best(), found.prompt_tokens, found.model) == (["yes", "no", "no"], 7, "demo")
    async with AsyncClient(router.address) as asynchronous:
        assert (await asynchronous.classify("a")).scores == ((0.0, 0.5),)
    first, second = router.requests
    kinds = [item.WhichOneof("input") for item in first.input]
    assert (kinds, first.raw, first.truncate_prompt_tokens) == (["text", "pair", "tokens"], True, -1)
    assert (first.input[1].pair.first, first.input[1].pair.second) == ("b", "c")
    assert list(first.input[2].tokens.ids) == [5, 6]
    assert (second.HasField("model"), second.raw) == (False, False)


async def test_texts_and_tokens_are_embedded(router: Any) -> None:
    with Client(router.address) as client:
        found = client.embed(
            ["a", [5, 6]], model="demo", pooling="cls", normalize=False, dimensions=2, truncate_prompt_tokens=-1
        )
        assert client.embed("a").vectors == ((0.0, 0.5),)
        with pytest.raises(ValueError, match="pooling"):
            client.embed("a", pooling="max")  # type: ignore[arg-type]
    assert (found.vectors, found.prompt_tokens, found.model) == (((0.0, 0.5), (1.0, 0.5)), 7, "demo")
    async with AsyncClient(router.address) as asynchronous:
        assert await asynchronous.embed(["a", [5, 6]]) == found
        router.error = errors.InvalidArgumentError("no", field="input[0]")
        with pytest.raises(sapwood_client.InvalidArgumentError) as caught:
            await asynchronous.embed("")
    assert caught.value.field == "input[0]"
    first = router.requests[0]
    assert (first.input[0].text, list(first.input[1].tokens.ids), first.model) == ("a", [5, 6], "demo")
    assert (first.dimensions, first.truncate_prompt_tokens) == (2, -1)
    assert (first.pooling, first.normalize, first.HasField("normalize")) == (worker_pb2.POOLING_CLS, False, True)
