"""Random programs give what a plain interpreter gives that does one thing after the other, errors and cancellation included."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sapwood.lang as sl
from sapwood.lang.nodes import Expression

NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(["x", " yz", "\n", "ok ", "stop!"])  # the model refuses to continue after a bang
CHOICES = st.lists(st.sampled_from(["yes", "no", "may be", "n"]), min_size=2, max_size=3, unique=True)
METHODS = st.sampled_from([sl.token_length_normalized, sl.greedy_token_selection])
MODES = st.sampled_from(["gather_variable", "concate_and_append", "none"])


def _steps(depth: int) -> Any:
    simple = [
        st.tuples(st.just("text"), TEXTS),
        st.tuples(st.just("text"), TEXTS),
        st.tuples(st.just("gen"), NAMES),
        st.tuples(st.just("unnamed"), st.none()),
        st.tuples(st.just("select"), NAMES, CHOICES, METHODS),
        st.tuples(st.just("set"), NAMES, TEXTS),
        st.tuples(st.just("read"), NAMES),
        st.tuples(st.just("role"), st.sampled_from(["user", "assistant"]), TEXTS),
    ]
    if depth:
        inner = st.deferred(lambda: _steps(depth - 1))
        simple += [
            st.tuples(st.just("fork"), st.lists(inner, min_size=1, max_size=3), MODES),
            st.tuples(st.just("all"), st.integers(2, 3), NAMES, MODES),
            st.tuples(st.just("scope"), NAMES, inner),
        ]
    return st.lists(st.one_of(simple), max_size=6)


@dataclass
class Plain:
    """The plain interpreter: a text, turns and variables, changed at once."""

    oracle: Any
    text: str = ""
    messages: list[Any] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    own: dict[str, None] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)
    in_scope: bool = False
    failed: bool = False

    def set(self, name: str, value: Any) -> None:
        self.variables[name] = value
        self.own[name] = None

    def run(self, steps: Any) -> None:
        for step in steps:
            self.step(*step)

    def step(self, kind: str, *of: Any) -> None:
        answer, logprobs = self.oracle
        match kind:
            case "text":
                self.text += of[0]
            case "gen" | "unnamed":
                found = answer(self.text)
                self.text += found
                if of[0] is not None:
                    self.set(of[0], found)
            case "select":
                name, choices, method = of
                of_each = [logprobs(self.text, choice) for choice in choices]
                best = _likeliest(of_each) if method is sl.token_length_normalized else _greedy(of_each)
                self.text += choices[best]
                self.set(name, choices[best])
            case "set":
                self.set(*of)
            case "read":
                self.text += str(self.variables.get(of[0], "none"))
            case "role":
                self.text += f"{of[0].upper()}:{of[1]}\n"
                self.messages.append({"role": of[0], "content": of[1]})
            case "scope":
                at = len(self.text)
                self.run(of[1])
                self.set(of[0], self.text[at:])
            case "fork":
                self.forks(of[0], of[1])
            case "all":
                self.forks([[("text", "-"), ("gen", of[1])]] * of[0], of[2])

    def forks(self, programs: Any, mode: str) -> None:
        at = len(self.text)
        children = []
        for steps in programs:
            child = Plain(self.oracle, self.text, [*self.messages], {**self.variables}, gathered={*self.gathered})
            child.run(steps)
            children.append(child)
        if mode == "concate_and_append":
            self.text += "".join(child.text[at:] for child in children)
        elif mode == "gather_variable":
            found: dict[str, list[Any]] = {}
            for child in children:
                for name in child.own:
                    if name not in self.variables or name in self.gathered:
                        found.setdefault(name, []).append(child.variables[name])
            for name, values in found.items():
                self.set(name, values)
            self.gathered |= set(found)


def _likeliest(of_each: list[Any]) -> int:
    means = [sum(each) / len(each) for each in of_each]
    return means.index(max(means))


def _greedy(of_each: list[Any]) -> int:
    longest = max(map(len, of_each))
    rows = [[*each, *[sum(each) / len(each)] * (longest - len(each))] for each in of_each]
    return rows.index(max(rows))


def _append(s: sl.State, steps: Any) -> None:
    """The same steps as a program."""
    for kind, *of in steps:
        match kind:
            case "text":
                s += of[0]
            case "gen":
                s += "" + sl.gen(of[0])
            case "unnamed":
                s += sl.gen()
            case "select":
                s += sl.select(of[0], of[1], choices_method=of[2])
            case "set":
                s[of[0]] = of[1]
            case "read":
                s += str(s[of[0]]) if of[0] in s else "none"
            case "role":
                s += _turn(of[0])(of[1])
            case "scope":
                with s.var_scope(of[0]):
                    _append(s, of[1])
            case "fork":
                forks = s.fork(len(of[0]))
                for fork, each in zip(forks, of[0], strict=True):
                    _append(fork, each)
                if of[1] != "none":
                    forks.join(of[1])
            case "all":
                forks = s.fork(of[0])
                forks += "-" + sl.gen(of[1])
                if of[2] != "none":
                    forks.join(of[2])


def _turn(role: str) -> Any:
    turns: dict[str, Any] = {"user": sl.user, "assistant": sl.assistant}
    return turns[role]


@given(steps=_steps(2))
@settings(max_examples=150)
def test_a_random_program_gives_what_the_plain_interpreter_gives(make_backend: Any, oracle: Any, steps: Any) -> None:
    plain = Plain(oracle)
    try:
        plain.run(steps)
    except ValueError:
        plain.failed = True
    backend = make_backend()
    program = sl.function(lambda s: _append(s, steps))
    if plain.failed:
        with pytest.raises(sl.ProgramError, match="the model refuses"):
            program.run(backend=backend)
    else:
        state = program.run(backend=backend)
        assert (state.text(), state.messages()) == (plain.text, plain.messages)
        assert state._executor.variables == plain.variables
    assert backend.running == 0
    backend.loop.close()


@given(steps=_steps(2), after=st.integers(1, 6))
@settings(max_examples=60)
def test_a_cancelled_program_leaves_no_request_and_no_waiting_reader(make_backend: Any, steps: Any, after: int) -> None:
    backend = make_backend()

    async def run() -> bool:
        task = asyncio.current_task()
        assert task is not None
        backend.on_ask = lambda count: task.cancel() if count == after else None
        try:
            await program.arun(backend=backend)
        except sl.ProgramError:
            return False
        except asyncio.CancelledError:
            task.uncancel()
            return True
        return False

    program = sl.function(lambda s: _append(s, steps))
    cancelled = asyncio.run(asyncio.wait_for(run(), 60))
    assert backend.running == 0
    assert len(backend.released) >= 1
    if len(backend.asked) < after:
        assert not cancelled


def test_reading_an_expression_twice_appends_its_nodes_twice(backend: Any, oracle: Any) -> None:
    answer, _ = oracle
    twice: Expression = "a" + sl.gen("x")

    @sl.function
    def program(s: sl.State) -> None:
        s += twice
        s += twice

    first = f"a{answer('a')}"
    assert program.run(backend=backend).text() == f"{first}a{answer(first + 'a')}"
