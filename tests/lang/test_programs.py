"""What programs give, computed by hand from the backend's own functions."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
import time
from typing import Any

import pytest

import sapwood.lang as sl
from sapwood.lang.backends.base import Generated, Usage
from sapwood.lang.nodes import VALUES, Gen


def test_text_and_answers_follow_each_other_and_variables_hold_the_answers(backend: Any, oracle: Any) -> None:
    answer, _ = oracle

    @sl.function
    def program(s: sl.State, question: str) -> str:
        s += "Q: " + question + "\nA:" + sl.gen("answer") + "\n"
        s["length"] = len(s["answer"])
        s += sl.gen("more")
        return s["answer"] + "?"

    state = program.run("why", backend=backend)
    first = answer("Q: why\nA:")
    assert state["answer"] == first and state["length"] == len(first)
    assert state.text() == f"Q: why\nA:{first}\n" + answer(f"Q: why\nA:{first}\n")
    assert state.returned == first + "?"
    assert state.get_meta_info("answer")["completion_tokens"] == len(first)
    assert "answer" in state and "other" not in state


def test_an_async_program_gives_what_the_plain_one_gives(backend: Any) -> None:
    @sl.function
    def plain(s: sl.State) -> None:
        s += "a" + sl.gen("x")
        s += s["x"].upper() + sl.gen("y")

    @sl.function
    async def awaited(s: sl.State) -> None:
        s += "a" + sl.gen("x")
        s += (await s.get("x")).upper() + sl.gen("y")

    texts = {plain.run(backend=backend).text(), awaited.run(backend=backend).text()}
    texts |= {asyncio.run(program.arun(backend=backend)).text() for program in (plain, awaited)}
    assert len(texts) == 1


def test_an_async_program_that_would_block_its_loop_is_refused(backend: Any) -> None:
    @sl.function
    async def program(s: sl.State) -> None:
        s += "a" + sl.gen("x")
        s["x"]

    with pytest.raises(RuntimeError, match=r"await s\.get"):
        program.run(backend=backend)

    async def inside() -> None:
        program.run(backend=backend)

    with pytest.raises(RuntimeError, match="await arun"):
        asyncio.run(inside())


def test_roles_are_turns_and_text_by_the_template(backend: Any, oracle: Any) -> None:
    answer, _ = oracle

    @sl.function
    def program(s: sl.State) -> None:
        s += sl.system("Be kind.")
        with s.user():
            s += "Hello"
        s.assistant(sl.gen("greeting"))
        s += sl.user_begin() + "Bye" + sl.user_end()

    state = program.run(backend=backend)
    begin = "SYSTEM:Be kind.\nUSER:Hello\nASSISTANT:"
    assert state.text() == f"{begin}{answer(begin)}\nUSER:Bye\n"
    assert [turn["role"] for turn in state.messages()] == ["system", "user", "assistant", "user"]
    assert state.messages()[2]["content"] == state["greeting"] == answer(begin)


def test_turns_that_are_nested_or_not_begun_are_errors_that_name_node_and_line(backend: Any) -> None:
    @sl.function
    def nested(s: sl.State) -> None:
        s += sl.user_begin() + "a" + sl.system_begin()

    @sl.function
    def not_begun(s: sl.State) -> None:
        s += sl.user_end()

    with pytest.raises(sl.ProgramError, match=r"system begins at .*test_programs\.py:\d+: .*nested"):
        nested.run(backend=backend)
    with pytest.raises(sl.ProgramError, match="no turn of user has begun"):
        not_begun.run(backend=backend)


@pytest.mark.parametrize("templates", ["chatml", "llama-3", "gemma", "mistral", "deepseek"])
def test_a_template_writes_its_own_marks(make_backend: Any, templates: str) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += sl.user("Hi") + sl.assistant("Yes")

    template = sl.get_template(templates)
    text = program.run(backend=make_backend(templates)).text()
    before, after = template.turns["user"]
    assert text.startswith(f"{template.begin}{before}Hi{after}") and text.count(template.begin or "\0") <= 1


def test_a_registered_template_is_found_by_its_name_and_by_its_models() -> None:
    from sapwood.lang.templates import template_of

    sl.register_template(sl.Template("tests-own", {"user": ("<", ">")}), r"^tests-model")
    assert sl.get_template("tests-own").turns == {"user": ("<", ">")}
    assert template_of("tests-model-7b").name == "tests-own"
    assert template_of("Qwen3-8B").name == "chatml"
    assert template_of("nobody").name == "plain"
    with pytest.raises(ValueError, match="no role 'system'"):
        sl.get_template("tests-own").around("system", first=True)
    with pytest.raises(ValueError, match="there is no template 'none'"):
        sl.get_template("none")


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [(int, r"[-+]?\d+[ \n]*"), (float, r"[-+]?[0-9]*\.?[0-9]+"), (bool, "(True|False)"), (str, '"')],
)
def test_a_dtype_is_a_regular_expression(dtype: type, pattern: str) -> None:
    node = sl.gen("x", dtype=dtype)
    assert isinstance(node, Gen)
    example = {int: "12", float: "1.5", bool: "True", str: '"a b"'}[dtype]
    assert re.fullmatch(node.options["regex"], example) and node.kind == dtype.__name__
    assert VALUES[node.kind](example) == {int: 12, float: 1.5, bool: True, str: "a b"}[dtype]


def test_values_are_of_the_type_that_their_node_says(make_backend: Any) -> None:
    class Numbers(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            found = await super().generate(prompt, options)
            text = json.dumps({"a": [1]}) if "json_schema" in options else "42"
            return type(found)((text,) * len(found.texts), found.usage)

    @sl.function
    def program(s: sl.State) -> None:
        s += sl.gen_int("i") + sl.gen_float("f") + sl.gen("j", json_schema={"type": "object"}) + sl.gen("t")
        s += sl.gen("many", dtype=int, n=2)

    state = program.run(backend=Numbers())
    assert [state.value(name) for name in ("i", "f", "j", "t")] == [42, 42.0, {"a": [1]}, "42"]
    assert state["i"] == "42" and state.value("many") == [42, 42]


def test_a_value_is_of_the_node_that_set_it_last_also_in_forks(make_backend: Any) -> None:
    class Numbers(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            found = await super().generate(prompt, options)
            return dataclasses.replace(found, texts=("7",) * len(found.texts))

    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen_int("x") + sl.gen_int("y") + sl.gen_int("z")
        s["x"] = "no number"
        s += sl.gen("y") + sl.select("z", ["one"])
        forks = s.fork(2)
        forks += "b" + sl.gen_int("w", n=2)
        forks += sl.gen_int("v")
        forks[0]["u"] = forks[1]["u"] = "text"
        forks.join()

    state = program.run(backend=Numbers())
    assert [state.value(name) for name in "xyzuvw"] == [
        "no number", "7", "one", ["text", "text"], [7, 7], [[7, 7], [7, 7]],
    ]  # fmt: skip


def test_a_value_that_was_cut_off_is_an_error_that_names_variable_and_line(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen("x", json_schema={"type": "object"})

    state = program.run(backend=backend)
    with pytest.raises(ValueError, match=r"'x' is ' .*': that is no whole json \(.*test_programs.py:\d+\)"):
        state.value("x")
    with pytest.raises(KeyError, match=r"no variable 'nobody' \(.*test_programs.py:\d+\)"):
        state["nobody"]
    with pytest.raises(RuntimeError, match=r"the run has ended.*test_programs.py:\d+\)"):
        state += "more"


def test_a_chain_of_forks_may_be_longer_than_a_stack_is_deep(backend: Any) -> None:
    @sl.function
    def program(s: sl.State, length: int) -> int:
        s += "a"
        for _ in range(length):
            s = s.fork(1)[0]
            s += "b"
        return len(s.text())

    assert program.run(1200, backend=backend).returned == 1201
    assert program.run_batch([(1200,)], backend=backend)[0].returned == 1201


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: sl.gen("a", regex="("), "no regular expression"),
        (lambda: sl.gen("a", regex="a", json_schema={}), "only one of regex and json_schema"),
        (lambda: sl.gen("a", temprature=1), "no option 'temprature'"),
        (lambda: sl.gen("a", dtype=dict), "dtype is one of"),
        (lambda: sl.gen(5), "the name of a gen is a text, not 5"),
        (lambda: sl.gen("a", "20"), "max_tokens is a whole number, not '20'"),
        (lambda: sl.select("a", []), "needs a list of choices"),
        (lambda: sl.select("a", "yes"), "needs a list of choices"),
        (lambda: sl.gen("a", choices="yes"), "needs a list of choices"),
        (lambda: sl.select("a", ["b", ""]), "not empty"),
        (lambda: sl.select("a", ["b"], temperature=0.5), "temperature is 0"),
        (lambda: sl.gen("a", choices=["b"], temperature=0.5), "temperature is 0"),
        (lambda: sl.gen("a", choices=["b"], dtype=int), "only one of choices and dtype"),
        (lambda: sl.gen("a", choices=["b"], regex="c"), "only one of choices and regex"),
        (lambda: sl.gen("a", choices=["b"], temprature=0), "no option 'temprature'"),
        (lambda: sl.gen("a", choices_method=sl.greedy_token_selection), "there are no choices"),
        (lambda: sl.gen("a", dtype=int, regex="[0-9]{2}"), "only one of dtype and regex"),
        (lambda: sl.select(5, ["b"]), "the name of a select is a text, not 5"),
        (lambda: sl.select("a", ["b"], choices_method="greedy_token_selection"), "choices_method is one of"),
        (lambda: sl.separate_reasoning("text"), "a gen with a name"),
    ],
)
def test_a_wrong_node_is_refused_where_it_is_made(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_an_expression_in_an_f_string_is_refused() -> None:
    for each in (sl.gen("a"), "text" + sl.gen("a"), sl.user("hi")):
        with pytest.raises(TypeError, match=r"append it with \+ \(.*test_programs.py:\d+\)"):
            f"Answer: {each}"


def test_functions_whose_arguments_no_run_could_give_are_no_programs() -> None:
    def several(s: sl.State, *parts: str) -> None: ...
    def named(s: sl.State, **parts: str) -> None: ...
    def in_order(s: sl.State, part: str, /) -> None: ...
    def stream(s: sl.State, stream: str) -> None: ...
    def backend(s: sl.State, backend: str = "x") -> None: ...

    for wrong in (several, named, in_order, stream, backend):
        with pytest.raises(TypeError, match="cannot have the argument"):
            sl.function(wrong)


def test_arguments_that_a_program_has_not_are_refused(backend: Any) -> None:
    @sl.function
    def program(s: sl.State, a: str, b: str = "x") -> None:
        s += a + b

    assert program.run("1", backend=backend).text() == "1x"
    assert program.bind(a="2").run(b="y", backend=backend).text() == "2y"
    for wrong in ({}, {"a": "1", "c": 2}):
        with pytest.raises(TypeError):
            program.run(backend=backend, **wrong)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        program.run(1, 2, 3, backend=backend)
    with pytest.raises(TypeError, match="no argument 'c'"):
        program.bind(c=1)
    with pytest.raises(ValueError, match="give a backend"):
        program.run("1")
    with pytest.raises(TypeError, match="None was appended"):
        sl.function(lambda s: s.__iadd__(None)).run(backend=backend)


def test_options_of_a_run_are_defaults_of_its_nodes(make_backend: Any) -> None:
    seen: list[Any] = []

    class Seeing(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            seen.append(dict(options))
            return await super().generate(prompt, options)

    @sl.function
    def program(s: sl.State) -> None:
        s += sl.gen("a") + sl.gen("b", 5, temperature=0.5, regex="x")

    program.run(backend=Seeing(), max_new_tokens=7, temperature=0, json_schema={})
    assert seen == [
        {"max_tokens": 7, "temperature": 0, "json_schema": {}},
        {"max_tokens": 5, "temperature": 0.5, "regex": "x"},
    ]


def test_scopes_hold_the_text_between_their_ends(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a"
        with s.var_scope("outer"):
            s += "b"
            with s.var_scope("inner"):
                s += "c" + sl.gen("x")
            s += "d"

    state = program.run(backend=backend)
    assert state["inner"] == "c" + state["x"] and state["outer"] == f"b{state['inner']}d"


def test_forks_go_on_apart_and_join_gathers_what_they_set(backend: Any, oracle: Any) -> None:
    answer, _ = oracle

    @sl.function
    def program(s: sl.State) -> None:
        s += "begin" + sl.gen("first")
        forks = s.fork(3)
        for index, fork in enumerate(forks):
            fork += f" {index}:" + sl.gen("idea")
        forks.join()
        s += " chosen:" + s["idea"][1]
        with s.copy() as copy:
            copy += sl.gen("aside")

    state = program.run(backend=backend)
    begin = "begin" + answer("begin")
    ideas = [answer(f"{begin} {index}:") for index in range(3)]
    assert state["idea"] == ideas and state["first"] == answer("begin")
    assert state.text() == f"{begin} chosen:{ideas[1]}"
    assert state["aside"] == [answer(state.text())]


def test_a_fork_that_its_source_has_not_come_to_waits_for_its_variables(make_backend: Any, oracle: Any) -> None:
    class Slow(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().generate(prompt, options)

    seen: list[Any] = []

    @sl.function
    def program(s: sl.State) -> None:
        s += "x" + sl.gen("a")
        [one, other] = s.fork(2)
        seen.extend(["a" in one, one["a"], other.text()])

    program.run(backend=Slow())
    answer, _ = oracle
    assert seen == [True, answer("x"), "x" + answer("x")]


def test_join_by_concatenation_appends_what_forks_wrote(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a"
        forks = s.fork(3)
        forks += lambda index: f"<{index}>"
        forks += ["x", "y", "z"]
        forks.join("concate_and_append")
        s += "b"

    assert program.run(backend=backend).text() == "a<0>x<1>y<2>zb"


def test_forks_are_refused_where_they_make_no_sense(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        with pytest.raises(ValueError, match="at least one state"):
            s.fork(0)
        with pytest.raises(TypeError, match=r"whole number of states, not 2\.5"):
            s.fork(2.5)  # type: ignore[arg-type]
        forks = s.fork(2)
        with pytest.raises(ValueError, match="3 expressions for 2 forks"):
            forks += ["a", "b", "c"]
        with pytest.raises(ValueError, match="cannot be replaced"):
            forks[0] = s  # type: ignore[index]
        with pytest.raises(ValueError, match="mode is"):
            forks.join("other")

    program.run(backend=backend)


def test_a_gen_of_all_forks_is_one_request_while_their_texts_are_equal(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a"
        forks = s.fork(3)
        forks += "b" + sl.gen("x") + "c" + sl.gen("y")
        forks.join()

    state = program.run(backend=backend)
    assert backend.asked[0] == ("generate", "ab", 3)
    assert [count for _, _, count in backend.asked[1:]] == [1, 1, 1]
    assert len(state["x"]) == len(state["y"]) == 3
    backend.asked.clear()
    program.run(backend=backend, temperature=0)
    assert backend.asked[0] == ("generate", "ab", 1)  # greedy answers are equal
    backend.asked.clear()
    program.run(backend=backend, seed=3)
    assert [count for _, _, count in backend.asked] == [1] * 6

    @sl.function
    def apart(s: sl.State) -> None:
        forks = s.fork(2)
        forks[0] += "x"
        forks += sl.gen("y")

    backend.asked.clear()
    apart.run(backend=backend)
    assert sorted(backend.asked) == [("generate", "", 1), ("generate", "x", 1)]


def test_the_error_of_a_shared_request_is_each_forks(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        forks = s.fork(3)
        forks += "no!" + sl.gen("x")
        for fork in forks:
            assert "the model refuses" in str(fork.error())

    with pytest.raises(sl.ProgramError, match=r"gen\('x'\) at .*the model refuses"):
        program.run(backend=backend)


@pytest.mark.parametrize(
    "method",
    [sl.token_length_normalized, sl.greedy_token_selection, sl.unconditional_likelihood_normalized],
    ids=lambda method: method.name,
)
def test_select_takes_the_likeliest_choice_and_its_meta_has_the_scores(backend: Any, oracle: Any, method: Any) -> None:
    _, logprobs = oracle
    choices = ["yes", "no", "perhaps"]

    @sl.function
    def program(s: sl.State) -> None:
        s += "Is it?" + sl.select("x", choices, choices_method=method)

    state = program.run(backend=backend)
    means = {choice: sum(logprobs("Is it?", choice)) / len(choice) for choice in choices}
    gains = {choice: means[choice] - sum(logprobs("", choice)) / len(choice) for choice in choices}
    meta = state.get_meta_info("x")
    expected = gains if method.requires_unconditional else means
    assert meta["scores"] == pytest.approx(expected)
    assert meta["logprobs"]["no"] == list(logprobs("Is it?", "no"))
    if method is not sl.greedy_token_selection:
        assert state["x"] == max(choices, key=lambda choice: expected[choice])
    assert state.text() == "Is it?" + state["x"] and backend.asked == [("score", "Is it?", 3)]


def test_states_with_equal_texts_ask_once_for_the_same_choices(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> list[Any]:
        s += "a"
        forks = s.fork(3)
        for fork in forks:
            fork += sl.select("x", ["b", "c"])
        forks[0] += "d"
        for fork in forks:
            fork += sl.select("y", ["b", "c"])
        return [(fork["x"], fork["y"], fork.get_meta_info("x")["scores"]) for fork in forks]

    state = program.run(backend=backend)
    first, second, third = state.returned
    assert second == third and first[0] == second[0] and first[2] == second[2]
    assert len(backend.asked) == 3 and state.timeline().requests == 3
    program.run(backend=backend)
    assert len(backend.asked) == 6, "another run asks again"


def test_who_waits_for_the_same_scores_gets_the_same_error(make_backend: Any) -> None:
    class Broken(make_backend):  # type: ignore[misc]
        async def score(self, *args: Any, **more: Any) -> Any:
            await super().score(*args, **more)
            raise OSError("no scores")

    @sl.function
    def program(s: sl.State) -> list[Any]:
        s += "a"
        forks = s.fork(2)
        for fork in forks:
            fork += sl.select("x", ["b", "c"])
        return [fork.error() for fork in forks]

    broken = Broken()
    with pytest.raises(sl.ProgramError, match="no scores"):
        program.run(backend=broken)
    assert len(broken.asked) <= 2


def test_a_choice_among_one_asks_nobody(backend: Any) -> None:
    state = sl.function(lambda s: s.__iadd__(sl.gen("x", choices=["only"]))).run(backend=backend)
    assert state["x"] == "only" and not backend.asked


def test_commit_computes_the_text_so_far_and_states_are_released_at_the_end(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "long text"
        s.commit()
        s.fork(2)

    program.run(backend=backend)
    assert backend.asked == [("commit", "long text", 0)] and len(backend.released) == 3


def test_reasoning_is_set_apart_by_name(make_backend: Any) -> None:
    class Thinking(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            found = await super().generate(prompt, options)
            return type(found)(("<think>hm\nhm</think>\n42",), found.usage)

    @sl.function
    def program(s: sl.State) -> None:
        s += "Q" + sl.separate_reasoning(sl.gen("x"), model_type="any") + "."

    state = program.run(backend=Thinking())
    assert (state["x"], state["x_reasoning_content"]) == ("42", "hm\nhm") and state.text() == "Q42."


def test_reasoning_is_set_apart_from_each_of_several_answers(make_backend: Any) -> None:
    class Thinking(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            found = await super().generate(prompt, options)
            if prompt.text == "apart:":
                return type(found)(("41", "42"), found.usage, ("why", ""))
            return type(found)(("<think>hm</think> 41", "42"), found.usage)

    @sl.function
    def program(s: sl.State, begin: str) -> None:
        s += begin + sl.separate_reasoning(sl.gen("x", n=2)) + "."

    for begin, reasoning in (("Q:", ["hm", ""]), ("apart:", ["why", ""])):
        state = program.run(begin, backend=Thinking())
        assert (state["x"], state["x_reasoning_content"]) == (["41", "42"], reasoning)
        assert state.text() == begin + "41."


def test_a_stream_gives_the_text_and_each_variable_in_pieces(backend: Any, oracle: Any) -> None:
    answer, _ = oracle

    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen("x") + "b"

    read = threading.Event()
    backend.on_ask = lambda _: asyncio.to_thread(read.wait, 30)  # the model answers once the reader has the text before
    pieces = []
    for piece in program.run(backend=backend, stream=True).text_iter():
        pieces.append(piece)
        read.set()
    assert "".join(pieces) == f"a{answer('a')}b" and pieces[0] == "a"
    assert "".join(program.stream(backend=backend).text_iter("x")) == answer("a")

    async def collect() -> list[Any]:
        state = program.astream(backend=backend)
        return [each async for each in state.text_async_iter("x", return_meta_data=True)]

    found = asyncio.run(collect())
    assert "".join(text for text, _ in found) == answer("a")


def test_a_streams_error_comes_at_its_end(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen("x") + "!" + sl.gen("y")

    state = program.run(backend=backend, stream=True)
    pieces = []
    with pytest.raises(sl.ProgramError, match=r"gen\('y'\)"):
        for piece in state.text_iter():
            pieces.append(piece)  # noqa: PERF402 - what came before the error counts
    assert "".join(pieces).startswith("a ")


def test_an_error_names_the_node_and_its_line_and_ends_the_program(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "no!"
        s += sl.gen("x")
        s += s["x"]

    with pytest.raises(sl.ProgramError, match="the model refuses") as caught:
        program.run(backend=backend)
    line = program.func.__code__.co_firstlineno + 3
    assert caught.value.line == f"{__file__}:{line}" and caught.value.node == "gen('x')"
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_the_programs_own_passes_through(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen("x")
        s += {}["missing"]  # type: ignore[var-annotated]

    with pytest.raises(KeyError, match="missing"):
        program.run(backend=backend)
    assert backend.running == 0


def test_speculation_saves_requests_where_the_model_follows_the_form(make_backend: Any) -> None:
    class Form(make_backend):  # type: ignore[misc]
        async def generate(self, prompt: Any, options: Any) -> Any:
            found = await super().generate(prompt, options)
            whole = " Ada\nBorn: 1815\nJob: writer\n"
            done = prompt.text.partition("Name:")[2]
            rest = whole[len(done) :] if whole.startswith(done) else whole
            stop = options.get("stop")
            return type(found)((rest.partition(stop)[0] if stop else rest,), found.usage)

    def body(s: sl.State) -> None:
        s += "Name:" + sl.gen("name", stop="\n") + "\nBorn:" + sl.gen("born", stop="\n") + "\n"
        s += "Job:" + sl.gen("job", stop="\n") + "\n"

    plain, speculating = Form(), Form()
    one = sl.function(body).run(backend=plain)
    other = sl.function(num_api_spec_tokens=64)(body).run(backend=speculating)
    assert one.text() == other.text() == "Name: Ada\nBorn: 1815\nJob: writer\n"
    assert (one["job"], other["job"]) == (" writer", " writer")
    assert (len(plain.asked), len(speculating.asked)) == (3, 1)


def test_the_default_backend_is_used_where_none_is_named(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sl.global_config, "default_backend", None)
    sl.set_default_backend(backend)
    assert sl.function(lambda s: s.__iadd__("a")).run().text() == "a"
    assert sl.get_server_info() == {"backend": "the computed backend"}
    with pytest.raises(sl.UnsupportedError, match="flush_cache"):
        sl.flush_cache()


def test_the_timeline_shows_states_nodes_and_tokens_in_one_file(backend: Any, tmp_path: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a <b>" + sl.gen("x")
        s.fork(2)[1].__iadd__(sl.select("y", ["p", "q"]))

    timeline = program.run(backend=backend).timeline()
    page = timeline.save(tmp_path / "run.html").read_text()
    assert timeline.requests == 2 and "3 states" in page and "2 requests" in page
    assert "gen(&#x27;x&#x27;)" in page and "2 (of 0)" in page and "<b>" not in page
    assert not re.search(r"(src|href)=|https?://", page)


def test_what_is_no_backend_is_refused_by_name() -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen("x")

    with pytest.raises(TypeError, match="not 'http://127'"):
        program.run(backend="http://127")  # type: ignore[arg-type]


def test_a_string_with_a_line_break_has_a_value(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen_string("x")

    async def answer(*_: Any) -> Generated:
        return Generated(('"b\n\tc"',), Usage())

    monkeypatch.setattr(backend, "generate", answer)
    assert program.run(backend=backend).value("x") == "b\n\tc"


def test_who_begins_a_stream_reads_what_the_program_has_yet_to_say(backend: Any, oracle: Any) -> None:
    @sl.function
    def program(s: sl.State, text: str) -> str:
        time.sleep(0.05)
        s += text + sl.gen("x")
        time.sleep(0.05)
        s += sl.gen("y")
        return "done"

    whole = program.run("a", backend=backend)
    for read in (
        lambda state: (state["x"], state["y"]),
        lambda state: state.text(),
        lambda state: state.error(),
        lambda state: "y" in state,
        lambda state: state.get_meta_info("y"),
        lambda state: (state.sync(), state.returned),
    ):
        assert read(program.stream("a", backend=backend)) == read(whole)
    assert isinstance(program.stream("a!", backend=backend).error(), sl.ProgramError)
    with pytest.raises(KeyError, match="nobody"):
        program.stream("a", backend=backend)["nobody"]

    async def begin_and_read() -> tuple[Any, Any]:
        state = program.astream("a", backend=backend)
        value = await state.get("x")
        await state.done()
        return value, state.text()

    assert asyncio.run(begin_and_read()) == (whole["x"], whole.text())


def test_the_error_of_a_fork_that_nobody_joins_is_the_states(backend: Any) -> None:
    @sl.function
    def program(s: sl.State, text: str) -> None:
        s += "a"
        forks = s.fork(1)
        forks[0] += text + sl.gen("x")

    streamed = program.stream("b!", backend=backend).error()
    assert streamed is not None and streamed.node == "gen('x')"
    (returned,) = program.run_batch([{"text": "b!"}], backend=backend, errors="return")
    error = returned.error()
    assert error is not None and error.node == "gen('x')"


def test_an_error_without_a_line_does_not_say_at() -> None:
    assert str(sl.ProgramError("run", "", "it was cancelled")) == "run: it was cancelled"
