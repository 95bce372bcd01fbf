"""The same program gives the same through every backend, and that is what the same calls by hand give."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

import sapwood.lang as sl
from sapwood.client import Client
from sapwood.scoring import Continuation

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}

BACKENDS: dict[str, Callable[[Any], sl.Backend]] = {
    "grpc": lambda server: sl.Sapwood(server.grpc),
    "http": lambda server: sl.SapwoodHttp(f"http://{server.http}"),
    "openai": lambda server: sl.OpenAI(
        "tiny", base_url=f"http://{server.http}/v1", api_key="none", completions=True, extras=True
    ),
    "anthropic": lambda server: sl.Anthropic("tiny", base_url=f"http://{server.http}", api_key="none"),
}


@pytest.fixture(params=BACKENDS)
def backend(server: Any, request: pytest.FixtureRequest) -> sl.Backend:
    return BACKENDS[request.param](server)


def completes(backend: sl.Backend) -> bool:
    return sl.Ability.TEXT in backend.abilities


@sl.function
def texts(s: sl.State, begin: str) -> None:
    s += begin + sl.gen("first", 6, stop="q")
    s += " then " + sl.gen("second", temperature=0)


@sl.function
def talk(s: sl.State, question: str) -> None:
    s += sl.system("Be kind.")
    s += sl.user(question) + sl.assistant(sl.gen("first"))
    s += sl.user("More?") + sl.assistant("Well, " + sl.gen("second"))


def test_a_program_of_texts_gives_what_the_calls_by_hand_give(server: Any, backend: sl.Backend) -> None:
    if not completes(backend):
        with pytest.raises(sl.UnsupportedError, match="text outside of roles"):
            texts.run("Once", backend=backend, **GREEDY)
        return
    state = texts.run("Once upon", backend=backend, **GREEDY)
    with Client(server.grpc) as client:
        first = client.generate("Once upon", temperature=0, max_tokens=6, stop="q").text()
        second = client.generate(f"Once upon{first} then ", temperature=0, max_tokens=8).text()
    assert (state["first"], state["second"]) == (first, second)
    assert state.text() == f"Once upon{first} then {second}"
    streamed = texts.run("Once upon", backend=backend, stream=True, **GREEDY)
    assert "".join(streamed.text_iter()) == state.text()
    usages = [event.usage for event in state.record.events]
    assert [usage.prompt_tokens for usage in usages] == [9, len("Once upon then ") + len(first.encode())] or first


def test_a_conversation_gives_what_the_calls_by_hand_give(server: Any, backend: sl.Backend) -> None:
    state = talk.run("Hello", backend=backend, **GREEDY)
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    with Client(server.grpc) as client:
        first = client.generate(messages=turns, **GREEDY).text()
        turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "More?"}]
        begun = [*turns, {"role": "assistant", "content": "Well, "}]
        second = client.generate(messages=begun, continue_final_message=True, **GREEDY).text()
    assert (state["first"], state["second"]) == (first, second)
    assert state.messages() == [*turns, {"role": "assistant", "content": "Well, " + second}]
    streamed = talk.run("Hello", backend=backend, stream=True, **GREEDY)
    assert "".join(streamed.text_iter("first")) == first
    assert streamed.text() == state.text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"regex": "[0-9]{3}x"}, r"^[0-9]{3}x$"),
        ({"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}}, r"^\[\s*(true|false)"),
        ({"ebnf": 'root ::= "ab" | "ac"'}, "^a[bc]$"),
    ],
    ids=["regex", "json_schema", "ebnf"],
)  # fmt: skip
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_grammars_hold_where_a_backend_has_them_and_are_refused_elsewhere(
    backend: sl.Backend, options: Any, expected: str, chat: bool
) -> None:
    import re

    @sl.function
    def program(s: sl.State) -> None:
        asked = sl.gen("x", 24, temperature=0, **options)
        s += sl.user("Go") + sl.assistant(asked) if chat else "Go" + asked

    if (not chat and not completes(backend)) or not set(options) <= backend.options:
        with pytest.raises(sl.UnsupportedError):
            program.run(backend=backend)
    else:
        assert re.search(expected, program.run(backend=backend)["x"])


def test_several_answers_are_a_list_as_the_client_gives_them(server: Any, backend: sl.Backend) -> None:
    if "n" not in backend.options:
        return

    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user("Hello") + sl.assistant(sl.gen("x", 6, n=3, seed=5))

    found = program.run(backend=backend)["x"]
    with Client(server.grpc) as client:
        deltas = list(client.generate(messages=[{"role": "user", "content": "Hello"}], n=3, seed=5, max_tokens=6))
    assert found == ["".join(delta.text for delta in deltas if delta.index == index) for index in range(3)]


@pytest.mark.parametrize("name", ["grpc", "http"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_select_counts_the_log_probabilities_of_the_choices_own_tokens(server: Any, name: str, chat: bool) -> None:
    choices = [" yes", " no", " perhaps not"]

    @sl.function
    def program(s: sl.State) -> None:
        chosen = sl.select("x", choices)
        s += sl.user("Is it so?") + sl.assistant("It is" + chosen) if chat else "Is it so? It is" + chosen

    meta = program.run(backend=BACKENDS[name](server)).get_meta_info("x")
    prompt = "user: Is it so?\nassistant: It is" if chat else "Is it so? It is"
    with Client(server.grpc) as client:
        for choice in choices:
            asked = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
            answer = client.generate(prompt + choice, **asked).answer()  # type: ignore[arg-type]
            by_hand = [each.logprob for each in answer.prompt_logprobs][-len(choice) :]  # a letter a token
            assert meta["logprobs"][choice] == pytest.approx(by_hand, abs=0.02)


@pytest.mark.parametrize("name", ["grpc", "http"])
def test_a_stop_regex_ends_the_text_before_its_match(server: Any, name: str) -> None:
    @sl.function
    def program(s: sl.State, stop: Any) -> None:
        s += "Once" + sl.gen("x", 24, temperature=0, stop_regex=stop)

    backend = BACKENDS[name](server)
    whole = program.run([], backend=backend)["x"]
    stop = whole[5:7]
    import re

    for given in (re.escape(stop), ["never-comes", re.escape(stop)]):
        state = program.run(given, backend=backend)
        assert state["x"] == whole[: whole.index(stop)]
        assert state.get_meta_info("x")["matched_stop"] == stop
    assert "".join(program.run(re.escape(stop), backend=backend, stream=True).text_iter("x")) == state["x"]


def test_commit_pins_the_text_in_a_session_that_ends_with_the_program(server: Any) -> None:
    from sapwood.v1 import router_pb2, router_pb2_grpc

    seen: list[Any] = []

    @sl.function
    def program(s: sl.State) -> None:
        s += "A rather long text that is to stay in the cache of the worker while the program runs. " * 3
        s.commit()
        s.sync()
        (session,) = [each.id for each in backend._sessions.values()]
        pinned = 0
        while not pinned:  # the router pins once it has answered
            pinned = stub.GetSession(router_pb2.GetSessionRequest(id=session)).session.pinned_tokens
        seen.append((session, pinned))
        s += sl.gen("x", 4)

    import grpc

    backend = sl.Sapwood(server.grpc)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        state = program.run(backend=backend)
        ((session, pinned),) = seen
        assert pinned >= 240
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            stub.GetSession(router_pb2.GetSessionRequest(id=session))
    assert state.get_meta_info("x")["cached_tokens"] >= 240


def test_sglangs_endpoint_writes_conversations_by_a_template(server: Any) -> None:
    backend = sl.RuntimeEndpoint(f"http://{server.http}", chat_template_name="chatml")
    state = talk.run("Hello", backend=backend, **GREEDY)
    with Client(server.grpc) as client:
        prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert state["first"] == client.generate(prompt, stop="<|im_end|>", **GREEDY).text()
    assert sl.RuntimeEndpoint(f"http://{server.http}").template.name == "plain"
    assert sl.get_server_info(backend)["served_model_name"] == "tiny"
    sl.flush_cache(backend)
    with pytest.raises(ValueError, match="verify"):
        sl.RuntimeEndpoint(f"http://{server.http}", verify="file")


def test_a_backend_as_a_block_closes_its_connection(server: Any) -> None:
    import threading

    with sl.SapwoodHttp(f"http://{server.http}") as backend:
        assert texts.run("Once", backend=backend, **GREEDY)["second"]
        (thread,) = [each for each in threading.enumerate() if each.name == "sapwood.lang"][-1:]
        session = next(iter(backend._sessions._made.values()))
    thread.join(10)
    assert session.closed and not thread.is_alive()


def test_a_servers_refusal_names_the_node(backend: sl.Backend) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user("Hello") + sl.assistant(sl.gen("x", temperature=-1))

    with pytest.raises(sl.ProgramError, match=r"gen\('x'\) at .*test_backends\.py:\d+: .*temperature"):
        program.run(backend=backend)


@pytest.mark.slow
def test_an_engine_of_the_program_answers_as_its_own_calls_do(chatting_model: Any) -> None:
    import sapwood

    with sapwood.Engine(str(chatting_model), load_format="dummy", num_pages=512, threads=1) as engine:
        state = texts.run("Once upon", backend=sl.EngineBackend(engine), **GREEDY)
        assert state["first"] == engine.generate("Once upon", temperature=0, max_tokens=6, stop="q").text
        pairs = [("Is it?", " yes"), ("Is it?", " no")]
        choice = sl.function(lambda s: s.__iadd__("Is it?" + sl.select("x", [" yes", " no"])))
        meta = choice.run(backend=sl.EngineBackend(engine)).get_meta_info("x")
        for (_, more), score in zip(pairs, engine.score(pairs), strict=True):
            assert meta["logprobs"][more] == pytest.approx(score.logprobs, abs=0.02)


def test_states_in_sessions_send_what_is_new_and_forks_fork_them(server: Any) -> None:
    import grpc

    from sapwood.v1 import router_pb2, router_pb2_grpc

    @sl.function
    def program(s: sl.State) -> None:
        s += "A text that is long enough to fill some pages of the cache of the worker." + sl.gen("a", 4)
        s += " and" + sl.gen("b", 4)
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f" {index}" + sl.gen("c", 4)
        forks.join()
        s += " so" + sl.gen("d", 4, stop="never")
        for state in (s, *forks):
            state.sync()
            held = backend._sessions.get(state._executor._id)
            if held is not None:
                looked.append(stub.GetSession(router_pb2.GetSessionRequest(id=held.id)).session)

    looked: list[Any] = []
    backend = sl.Sapwood(server.grpc, sessions=True)
    options = {"temperature": 0, "ignore_eos": True}
    with grpc.insecure_channel(server.grpc) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        found = program.run(backend=backend, **options)
    assert [session.turns for session in looked] == [3, 1, 1]
    assert all(session.tokens > 80 for session in looked)
    assert not backend._sessions
    backend = sl.Sapwood(server.grpc)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        plain = program.run(backend=backend, **options)
    assert (found.text(), found["c"]) == (plain.text(), plain["c"])


def test_a_session_that_its_router_has_lost_begins_anew(server: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "Some text" + sl.gen("a", 4)
        s.sync()
        (held,) = backend._sessions.values()
        with Client(server.grpc) as client:
            client.close_session(held.id)
        s += " and" + sl.gen("b", 4)

    backend = sl.Sapwood(server.grpc, sessions=True)
    state = program.run(backend=backend, temperature=0, ignore_eos=True)
    with Client(server.grpc) as client:
        first = client.generate("Some text", temperature=0, ignore_eos=True, max_tokens=4).text()
        assert state["a"] == first
        asked = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
        assert state["b"] == client.generate(f"Some text{first} and", **asked).text()  # type: ignore[arg-type]


def test_a_server_of_texts_refuses_pictures_by_name(server: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user(sl.image(b"\x89PNG") + "What is it?") + sl.assistant(sl.gen("x"))

    for name, why in (
        ("grpc", "this model takes no pictures"),
        ("http", "this model takes no pictures"),
        ("openai", "this model takes no pictures"),
    ):
        with pytest.raises(sl.ProgramError, match=why):
            program.run(backend=BACKENDS[name](server))
    with pytest.raises(sl.UnsupportedError, match="images with a template"):
        program.run(backend=sl.Sapwood(server.grpc, template="chatml"))


def test_a_tree_of_continuations_is_one_request_that_computes_shared_tokens_once(server: Any) -> None:
    prompt = "Is it so? It is"  # a letter a token
    tree = [
        Continuation(" perhaps", [Continuation(" not"), Continuation(" never", [Continuation("!")])]), Continuation(" yes"),
    ]  # fmt: skip
    paths = [" perhaps", " perhaps not", " perhaps never", " perhaps never!", " yes"]
    with Client(server.grpc) as client:
        asked = requests_of(server)
        found = client.score(tree, prompt, unconditional=True)
        assert requests_of(server) - asked <= 2  # one for all with the prompt, one for all without
        for path, each in zip(paths, found.scores, strict=True):
            assert len(each.token_ids) == len(each.unconditional) == len(path)
            options = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0}
            alone = client.generate(prompt + path, **options).answer().prompt_logprobs  # type: ignore[arg-type]
            assert each.logprobs == pytest.approx([one.logprob for one in alone[-len(path) :]], abs=0.02)
            bare = client.generate(token_ids=each.token_ids, **options).answer().prompt_logprobs  # type: ignore[arg-type]
            assert each.unconditional == pytest.approx([0.0, *(one.logprob for one in bare)], abs=0.02)
        shared = client.score(paths, prompt)  # the same as a list: the server finds what they share
        assert [each.logprobs for each in shared.scores] == [
            pytest.approx(each.logprobs, abs=0.02) for each in found.scores
        ]
        # A leaf's last token is never computed.
        assert shared.computed_tokens == shared.prompt_tokens - shared.cached_tokens + len(" perhaps neveroye")
        ids = [list(each.token_ids) for each in found.scores]
        assert client.score(ids, token_ids=client_tokens(server, prompt)).scores[1].logprobs == pytest.approx(
            found.scores[1].logprobs, abs=0.02
        )
    status, answer = post(server, "/v1/score_tree", {"prompt": prompt, "continuations": [
        {"text": " perhaps", "next": [" not"]}, " yes"]})  # fmt: skip
    assert status == 200
    assert [each["text"] for each in answer["scores"]] == [" perhaps", " perhaps not", " yes"]
    assert answer["scores"][1]["logprobs"] == pytest.approx(found.scores[1].logprobs, abs=0.02)
    assert answer["scores"][1]["logprob"] == pytest.approx(found.scores[1].logprob, abs=0.02)
    assert answer["scores"][1]["unconditional_logprobs"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a", "continuations": []}, "continuations"),
        ({"prompt": "a", "continuations": ["b", ""]}, "continuations[1]"),
        ({"prompt": "a", "continuations": ["b", [1]]}, "continuations[1]"),
        ({"prompt": [1, 2], "continuations": ["b"]}, "continuations[0]"),
        ({"prompt": "a", "continuations": [{"text": "b", "next": "c"}]}, "continuations[0].next"),
        ({"prompt": "a", "continuations": [{"text": "b", "token_ids": [1]}]}, "continuations[0]"),
        ({"prompt": "a", "continuations": [{"words": "b"}]}, "continuations[0]"),
        ({"prompt": "a", "continuations": ["b"] * 1025}, "continuations"),
        ({"prompt": [1], "continuations": [[1 << 20]]}, "continuations"),
        ({"continuations": ["b"]}, "prompt"),
        ({"prompt": "a", "messages": [], "continuations": ["b"]}, "prompt"),
        ({"prompt": "a", "continue_final_message": True, "continuations": ["b"]}, "continue_final_message"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_tree_is_refused_by_the_name_of_its_field(server: Any, body: Any, field: str) -> None:
    status, answer = post(server, "/v1/score_tree", body)
    assert (status, answer["error"]["param"]) == (400, field), answer


def post(server: Any, path: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://{server.http}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def client_tokens(server: Any, text: str) -> list[int]:
    return post(server, "/tokenize", {"prompt": text})[1]["tokens"]


def requests_of(server: Any) -> float:
    """How many requests the router's workers have ended."""
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sapwood_router_requests_total"))


@pytest.mark.parametrize("name", ["grpc", "http", "openai"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_what_is_known_of_an_answer_has_one_form(server: Any, name: str, stream: bool, chat: bool) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        asked = sl.gen("x", 4, temperature=0, return_logprob=True, top_logprobs_num=2)
        s += sl.user("Hello") + sl.assistant(asked) if chat else "Hello" + asked

    state = program.run(backend=BACKENDS[name](server), stream=stream)
    state.sync()
    meta = state.get_meta_info("x")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"text": "Hello"}
    with Client(server.grpc) as client:
        answer = client.generate(**asked, max_tokens=4, temperature=0, logprobs=2).answer()
    assert meta["finish_reason"] == answer.finish_reason
    assert [each[0] for each in meta["output_token_logprobs"]] == pytest.approx(
        [each.logprob for each in answer.logprobs], abs=0.02
    )
    if name != "openai":  # its API has no ids
        assert [each[1] for each in meta["output_token_logprobs"]] == list(answer.token_ids)
    assert len(meta["output_top_logprobs"]) == len(answer.logprobs)
    assert all(len(each) == 3 for top in meta["output_top_logprobs"] for each in top)


@pytest.mark.parametrize("name", ["grpc", "http"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_a_structural_tag_may_be_a_mapping(server: Any, name: str, chat: bool) -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "xyz"}}

    @sl.function
    def program(s: sl.State) -> None:
        asked = sl.gen("x", 8, temperature=0, structural_tag=tag)
        s += sl.user("Hello") + sl.assistant(asked) if chat else "Hello" + asked

    assert program.run(backend=BACKENDS[name](server))["x"] == "xyz"


@pytest.mark.parametrize("name", ["grpc", "http"])
def test_healing_in_a_conversation_is_refused_by_the_trace(server: Any, name: str) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user("Hello") + sl.assistant(sl.gen("x", token_healing=True))

    with pytest.raises(sl.UnsupportedError, match="token_healing in a conversation"):
        program.trace(backend=BACKENDS[name](server))


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with http://"):
        sl.SapwoodHttp("127.0.0.1:8000")


@pytest.mark.parametrize("name", ["grpc", "http"])
@pytest.mark.parametrize("how", ["stop_regex", "stream"])
def test_an_answer_that_is_read_as_it_comes_waits_for_a_server_too(name: str, how: str) -> None:
    """Nobody listens at first: the request is asked again until ``patience`` has passed, as others are."""

    @sl.function
    def program(s: sl.State) -> None:
        s += "Hello" + sl.gen("x", **({"stop_regex": "a"} if how == "stop_regex" else {}))

    def elsewhere(patience: float) -> sl.Backend:
        address = "127.0.0.1:9"
        if name == "grpc":
            return sl.Sapwood(address, patience=patience)
        return sl.SapwoodHttp(f"http://{address}", patience=patience)

    sleeps: list[float] = []
    with pytest.raises(sl.ProgramError), pytest.MonkeyPatch.context() as patch:
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            sleeps.append(seconds)
            await sleep(0.01)

        patch.setattr(asyncio, "sleep", noted)
        with elsewhere(0.5) as backend:
            state = program.run(backend=backend, stream=how == "stream")
            state.sync()
    assert 0.5 in sleeps
