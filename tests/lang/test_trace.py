"""Traces: nodes without a run, prefixes, and what a backend refuses."""

from __future__ import annotations

from typing import Any

import pytest

import sapwood.lang as sl
from sapwood.lang.backends.base import Ability
from sapwood.lang.nodes import RoleBegin, Text


def kinds(trace: sl.Trace) -> list[str]:
    return [type(node).__name__ for _, node in trace.nodes]


def test_a_trace_shows_the_nodes_and_asks_nobody(backend: Any) -> None:
    @sl.function
    def program(s: sl.State, question: str) -> None:
        s += "Q: " + question + sl.gen("answer")
        s += "So " + s["answer"] + sl.select("verdict", ["yes", "no"])
        forks = s.fork(2)
        forks += sl.gen("more")
        forks.join()
        s += s["more"]

    trace = program.trace(backend=backend)
    assert trace.stopped is None and not backend.asked
    assert kinds(trace) == [
        *("Text", "Unknown", "Gen", "Text", "Unknown", "Select", "Fork"),
        *("Shared", "Shared", "Join", "Unknown"),
    ]
    assert [state for state, node in trace.nodes if type(node).__name__ == "Shared"] == [1, 2]
    assert "%2 [0] gen('answer')" in str(trace) and "[0] fork(2)" in str(trace)
    known = program.trace(backend=backend, question="why?")
    assert isinstance(known.nodes[0][1], Text) and known.nodes[0][1].text == "Q: why?"


@pytest.mark.parametrize(
    "look",
    [
        lambda value: f"{value}",
        lambda value: value == "x",
        lambda value: not value,
        lambda value: value.strip(),
        len,
        lambda value: value[0],
        list,
        int,
        lambda value: value + 1,
    ],
)
def test_a_trace_ends_where_the_program_looks_into_a_value(backend: Any, look: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a" + sl.gen("x")
        look(s["x"])
        s += "never"

    trace = program.trace(backend=backend)
    assert kinds(trace) == ["Text", "Gen"] and trace.stopped
    assert "..." in str(trace)


def test_a_trace_follows_programs_that_are_called_and_async_ones(backend: Any) -> None:
    @sl.function
    async def inner(s: sl.State, text: str) -> None:
        s += text + sl.gen("x")
        await s.done()

    @sl.function
    def outer(s: sl.State) -> None:
        s += "a"
        inner("b")

    trace = outer.trace(backend=backend)
    assert [(state, type(node).__name__) for state, node in trace.nodes] == [
        *((0, "Text"), (0, "Fork"), (1, "Text"), (1, "Gen")),
    ]


def test_the_prefix_is_what_comes_before_the_first_argument_or_answer(backend: Any) -> None:
    @sl.function
    def program(s: sl.State, question: str) -> None:
        s += sl.system("Be brief.")
        with s.user():
            s += "Q: " + question
        s += sl.assistant(sl.gen("x"))

    prefix = program.trace(backend=backend, only_prefix=True).prefix
    assert [type(node) for node in prefix][:2] == [RoleBegin, Text]
    assert [node.text for node in prefix if isinstance(node, Text)] == ["Be brief.", "Q: "]


ROLES = sl.user("a") + sl.assistant(sl.gen("x"))


@pytest.mark.parametrize(
    ("able", "expression", "why"),
    [
        ((), "a" + sl.gen("x"), "text outside of roles"),
        ((Ability.TEXT,), ROLES, "roles"),
        ((Ability.TEXT,), "a" + sl.select("x", ["b", "c"]), "select"),
        (
            (Ability.TEXT, Ability.SELECT),
            "a" + sl.select("x", ["b", "c"], choices_method=sl.unconditional_likelihood_normalized),
            "unconditional",
        ),
        ((Ability.ROLES,), sl.user("a") + sl.assistant("b" + sl.gen("x")), "assistant's turn that the program begins"),
        ((Ability.ROLES,), sl.user(sl.gen("x")), "a user's turn by the model"),
        ((Ability.ROLES, Ability.TEXT), ROLES + "more", "text outside of roles in a conversation"),
        ((Ability.ROLES, Ability.TEXT), "text" + ROLES, "roles after text outside of roles"),
        ((Ability.TEXT,), "a" + sl.image("b.png"), "images: it serves text only"),
        ((Ability.TEXT,), "a" + sl.video("b.mp4"), "videos"),
        ((Ability.TEXT,), "a" + sl.commit(), "commit"),
        ((Ability.TEXT,), "a" + sl.separate_reasoning(sl.gen("x")), "separate_reasoning"),
        ((Ability.TEXT,), "a" + sl.gen("x", regex="a"), "the option regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_backend_cannot_do_is_refused_by_trace_run_and_batch(
    make_backend: Any, able: Any, expression: Any, why: str
) -> None:
    backend = make_backend(None)
    backend.abilities = frozenset(able)
    backend.options = frozenset({"max_tokens"})

    @sl.function
    def program(s: sl.State) -> None:
        s += expression

    with pytest.raises(sl.UnsupportedError, match=rf"test_trace\.py:\d+: the computed backend cannot do .*{why}"):
        program.trace(backend=backend)
    with pytest.raises(sl.UnsupportedError, match=why):
        program.run(backend=backend)
    assert not backend.asked or backend.asked[0][0] != "warm"


def test_a_batch_refuses_before_it_runs_any_row(make_backend: Any) -> None:
    backend = make_backend(None)
    backend.abilities = frozenset({Ability.TEXT})

    @sl.function
    def program(s: sl.State, text: str) -> None:
        begun.append(text)
        s += "a" + text + sl.select("x", ["b", "c"])

    begun: list[str] = []
    with pytest.raises(sl.UnsupportedError):
        program.run_batch([{"text": "b"}], backend=backend)
    assert not backend.asked and len(begun) == 1 and not isinstance(begun[0], str)


def test_a_program_that_tries_again_after_any_exception_is_not_traced_for_ever(backend: Any) -> None:
    @sl.function
    def program(s: sl.State) -> None:
        s += "a"
        for _ in range(100):
            try:
                s += sl.gen("x")
                int(s["x"])
                break
            except Exception:
                tried.append(1)

    tried: list[int] = []
    for only_prefix in (False, True):
        assert program.trace(backend=backend, only_prefix=only_prefix).stopped
    assert not tried
