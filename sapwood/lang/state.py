"""The state ``s`` of a program, as the program sees it.

Appending never waits. Reading a value waits for the nodes that make it: in a plain function by blocking, in an ``async def``
program by ``await s.get(name)`` and ``await s.done()``.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, SupportsIndex, overload

from sapwood.lang.errors import ProgramError
from sapwood.lang.interpreter import Interpreter, Record
from sapwood.lang.nodes import (
    VALUES,
    Expression,
    ExpressionList,
    Gen,
    Join,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    SetVariable,
    Shared,
    Text,
    commit,
    parts_of,
    where,
)
from sapwood.lang.timeline import Timeline


class Executor(Protocol):
    """What does a state's nodes: an interpreter, or a tracer that only looks at them."""

    submitted: int

    def submit(self, *nodes: Any) -> None: ...

    def fork(self, size: int) -> Sequence[Any]: ...


class State:
    """A text that grows, with variables. Programs get one as ``s``; forks are others.

    Args:
        executor: Does its nodes.
        outside: Whether it is for who has begun a stream, not for the program: reading waits for what the program has yet to say.
    """

    def __init__(self, executor: Any, *, outside: bool = False) -> None:
        self._executor: Any = executor
        self._outside = outside

    def __iadd__(self, other: str | Expression) -> Self:
        if other is None:
            raise TypeError(f"None was appended to the state ({where()})")
        self._executor.submit(*parts_of(other))
        return self

    # Roles and scopes.

    @overload
    def system(self, expr: str | Expression) -> Expression: ...
    @overload
    def system(self, expr: None = None) -> _Block: ...
    def system(self, expr: str | Expression | None = None) -> Expression | _Block:
        """A turn of the system: with an expression at once, without one as a ``with`` block."""
        return self._role("system", expr)

    @overload
    def user(self, expr: str | Expression) -> Expression: ...
    @overload
    def user(self, expr: None = None) -> _Block: ...
    def user(self, expr: str | Expression | None = None) -> Expression | _Block:
        """A turn of the user."""
        return self._role("user", expr)

    @overload
    def assistant(self, expr: str | Expression) -> Expression: ...
    @overload
    def assistant(self, expr: None = None) -> _Block: ...
    def assistant(self, expr: str | Expression | None = None) -> Expression | _Block:
        """A turn of the assistant."""
        return self._role("assistant", expr)

    def var_scope(self, name: str) -> _Block:
        """A ``with`` block: the text that it adds is a variable as well."""
        return _Block(self, ScopeBegin(name), ScopeEnd(name))

    def commit(self) -> None:
        """The server computes the text so far and keeps it cached while the program runs."""
        self._executor.submit(*parts_of(commit()))

    # Forks.

    def fork(self, size: int = 1) -> Forks:
        """So many states that go on from here, side by side.

        Raises:
            ValueError: ``size`` is below 1.
            TypeError: It is no whole number.
        """
        if not isinstance(size, SupportsIndex):
            raise TypeError(f"a fork has a whole number of states, not {size!r:.60} ({where()})")
        if (count := operator.index(size)) < 1:
            raise ValueError(f"a fork has at least one state, not {count} ({where()})")
        return Forks([State(each) for each in self._executor.fork(count)], self)

    @contextmanager
    def copy(self) -> Iterator[State]:
        """A ``with`` block with one fork; its variables are gathered when it ends."""
        forks = self.fork(1)
        yield forks[0]
        forks.join()

    # What programs read.

    def __getitem__(self, name: str) -> Any:
        try:
            return self._wait(lambda: self._get(name), not self._pending(name))
        except KeyError:
            raise KeyError(f"no variable {name!r} ({where()})") from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._executor.submit(SetVariable(name, value))

    def __contains__(self, name: str) -> bool:
        self.sync()
        return name in self._executor.variables

    def get_var(self, name: str) -> Any:
        """``s[name]``."""
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        """``s[name] = value``."""
        self[name] = value

    async def get(self, name: str) -> Any:
        """``s[name]`` for ``async def`` programs."""
        return await self._here(lambda: self._get(name))

    def value(self, name: str) -> Any:
        """A variable as what it says: a number for ``gen_int`` and ``gen_float``, JSON for a schema; else the text.

        Raises:
            ValueError: The text says none: ``max_tokens`` has cut it off.
        """
        text, kind = self[name], self._executor.kinds.get(name)
        if kind is None:
            return text
        try:
            return _value(text, kind)
        except ValueError:
            raise ValueError(f"{name!r} is {text!r:.80}: that is no whole {kind} ({where()})") from None

    def get_meta_info(self, name: str) -> Any:
        """What is known of an answer: tokens, finish reason, log probabilities; of a choice its scores."""
        self[name]
        return self._executor.meta.get(name)

    def text(self) -> str:
        """The text so far, waiting for what is on its way."""
        self.sync()
        return str(self._executor.text)

    def messages(self) -> list[Mapping[str, Any]]:
        """The turns so far."""
        self.sync()
        return list(self._executor.messages)

    def sync(self) -> None:
        """Waits until all so far is done."""
        self._wait(self._done, self._drained())

    async def done(self) -> None:
        """:meth:`sync` for ``async def`` programs."""
        await self._here(self._done)

    def error(self) -> ProgramError | None:
        """Why it ended early; None if it did not. Waits as :meth:`sync` does, and does not raise."""
        try:
            self.sync()
        except ProgramError as error:
            return error
        return None

    @property
    def returned(self) -> Any:
        """What the program returned."""
        return self._executor.returned

    ret_value = returned

    @property
    def record(self) -> Record:
        """The nodes that were done, with times and tokens: of this run, forks included."""
        found: Record = self._executor.record
        return found

    def timeline(self) -> Timeline:
        """The run as a picture: ``s.timeline().save("run.html")``."""
        return Timeline(self.record)

    # Streams.

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable's, piece by piece as it comes. Raises the program's error at the end."""
        at, ended = 0, False
        while not ended:
            piece, ended, _ = self._wait(lambda at=at: self._more(at, var_name), ready=False)  # type: ignore[misc]
            at += len(piece)
            if piece:
                yield piece

    @overload
    def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(self, var_name: str | None = None, *, return_meta_data: bool) -> AsyncIterator[Any]: ...
    async def text_async_iter(
        self, var_name: str | None = None, *, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """The same for asyncio; ``return_meta_data``: pairs of the text and what is known of the answer so far."""
        at, ended = 0, False
        while not ended:
            piece, ended, meta = await self._here(lambda at=at: self._more(at, var_name))  # type: ignore[misc]
            at += len(piece)
            if piece:
                yield (piece, meta) if return_meta_data else piece

    async def _more(self, at: int, name: str | None) -> tuple[str, bool, Any]:
        """The text from ``at`` on, once there is any; whether that was all."""
        run: Interpreter = self._executor
        while True:
            text = run.text if name is None else str(run.variables.get(name, ""))
            over = run.finished or (name is not None and name in run.variables and not run.pending(name))
            if len(text) > at or over:
                failed = over and run.error is not None
                if failed and len(text) <= at:
                    assert run.error is not None
                    raise run.error
                return text[at:], over and not failed, {} if name is None else run.meta.get(name, {})
            await run.progress()

    # Waiting.

    def _role(self, role: str, expr: str | Expression | None) -> Expression | _Block:
        if expr is None:
            return _Block(self, RoleBegin(role), RoleEnd(role))
        whole = ExpressionList([RoleBegin(role), *parts_of(expr), RoleEnd(role)])
        self._executor.submit(*whole)
        return whole

    async def _get(self, name: str) -> Any:
        if self._outside:
            await self._executor.reached(name)
        return await self._executor.get(name)

    async def _done(self) -> None:
        if self._outside:
            await self._executor.reached()
        await self._executor.drained()

    def _drained(self) -> bool:
        return bool(self._executor.idle) and not self._outside

    def _pending(self, name: str) -> bool:
        return bool(self._executor.pending(name)) or (self._outside and name not in self._executor.variables)

    def _wait(self, work: Callable[[], Coroutine[Any, Any, Any]], ready: bool) -> Any:
        """What ``work`` gives. On the program's own event loop it must be ready."""
        loop = self._executor.loop
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if loop is None or self._executor.finished or (here is loop and ready):
            return _at_once(work())
        if here is loop:
            raise RuntimeError(f"an async program awaits its values: await s.get(name), await s.done() ({where()})")
        future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _here(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What ``work`` gives, in whichever event loop this is."""
        loop = self._executor.loop
        if loop is None or loop is asyncio.get_running_loop() or self._executor.finished:
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))


class _Block:
    """A ``with`` block that submits a node at its begin and one at its end."""

    def __init__(self, state: State, begin: Any, end: Any) -> None:
        self._state, self._begin, self._end = state, begin, end

    def __enter__(self) -> None:
        self._state._executor.submit(self._begin)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._state._executor.submit(self._end)


class Forks(Sequence[State]):
    """States that go on from the same text. ``forks += expression`` appends to all of them.

    While all have the same text, a ``gen`` that is appended to all is one request with as many answers. It is not if it has a
    ``seed``, whose answers would be equal one by one.
    """

    def __init__(self, states: list[State], source: State) -> None:
        self._states = states
        self._source = source
        self._equal = 0
        """Nodes that all states have in common; -1: their texts may differ."""

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...
    def __getitem__(self, index: int | slice) -> State | Sequence[State]:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """``forks[i] += ...`` ends here. Raises ValueError for another state."""
        if self._states[index] is not state:
            raise ValueError("a fork cannot be replaced")

    def __len__(self) -> int:
        return len(self._states)

    def __iadd__(
        self, other: str | Expression | Sequence[str | Expression] | Callable[[int], str | Expression]
    ) -> Self:
        if isinstance(other, str | Expression):
            self._append_equal(other)
            return self
        self._equal = -1
        if callable(other):
            for index, state in enumerate(self._states):
                state += other(index)
            return self
        if len(other) != len(self._states):
            raise ValueError(f"{len(other)} expressions for {len(self._states)} forks ({where()})")
        for state, each in zip(self._states, other, strict=True):
            state += each
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Ends the forks' part: the source waits for them.

        Args:
            mode: ``gather_variable``: each variable that forks have set and the source had not is a list there, with a value
                of each fork in order. ``concate_and_append``: the source's text goes on with all their texts.

        Raises:
            ValueError: There is no such mode.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"join: mode is gather_variable or concate_and_append, not {mode!r} ({where()})")
        children = tuple(state._executor for state in self._states)
        self._source._executor.submit(Join(children, mode == "concate_and_append"))

    def _append_equal(self, other: str | Expression) -> None:
        executors = [state._executor for state in self._states]
        for node in parts_of(other):
            equal = self._equal >= 0 and all(each.submitted == self._equal for each in executors)
            if isinstance(node, Text) or not equal:
                for each in executors:
                    each.submit(node)
            elif isinstance(node, Gen) and len(executors) > 1 and _is_mergeable(node, executors[0].defaults):
                asked = executors[0].future()
                for index, each in enumerate(executors):
                    each.submit(Shared(node, index, len(executors), asked, line=node.line))
                self._equal = -1
                continue
            else:
                for each in executors:
                    each.submit(node)
                if isinstance(node, Gen):
                    self._equal = -1
                    continue
            if equal:
                self._equal += 1


def _is_mergeable(node: Gen, defaults: Mapping[str, Any]) -> bool:
    options = {**defaults, **node.options}
    return options.get("seed") is None and options.get("n", 1) == 1


def _value(text: Any, kind: str) -> Any:
    """What an answer says, or each of several."""
    return [_value(each, kind) for each in text] if isinstance(text, list) else VALUES[kind](text)


def _at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise RuntimeError("the state has ended without this value")
