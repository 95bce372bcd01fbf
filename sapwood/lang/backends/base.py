"""What the interpreter needs of a backend.

A backend is asked from the event loop that runs the program, and keeps one connection for each loop it is used from.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from sapwood.lang.choices import Scored
from sapwood.lang.errors import UnsupportedError
from sapwood.lang.nodes import (
    GRAMMARS,
    OPTION_NAMES,
    Commit,
    Gen,
    GenOptions,
    Image,
    Node,
    Reasoning,
    RoleBegin,
    RoleEnd,
    Select,
    Shared,
    Text,
    Video,
)
from sapwood.lang.templates import Template, get_template

ResultT = TypeVar("ResultT")
ConnectionT = TypeVar("ConnectionT")
Message = Mapping[str, Any]


class Ability(StrEnum):
    """What a backend may be able to do, apart from sampling options."""

    TEXT = "text outside of roles"
    ROLES = "roles"
    PREFILL = "an assistant's turn that the program begins"
    SELECT = "select"
    UNCONDITIONAL = "select by unconditional likelihood"
    IMAGE = "image"
    VIDEO = "video"
    COMMIT = "commit"
    REASONING = "separate_reasoning"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is there when a node asks.

    Attributes:
        text: All of it, as the backend's template writes it.
        messages: The turns that have ended.
        role: Whose turn it is; None: nobody's.
        turn: What this turn has so far.
        state: Names the state that asks, for backends that keep something for each.
    """

    text: str
    messages: tuple[Message, ...] = ()
    role: str | None = None
    turn: str | Sequence[Mapping[str, Any]] = ""
    state: int = 0

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return bool(self.messages) or self.role is not None

    @property
    def shows(self) -> bool:
        """Whether it has pictures or videos."""
        return not all(isinstance(each, str) for each in (self.turn, *(turn["content"] for turn in self.messages)))


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took, in tokens, as the server counts; zero where it does not say."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a streamed answer; ``reasoning`` comes before the answer. The last has the usage."""

    text: str
    reasoning: str = ""
    usage: Usage | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


class StreamedLogprobs:
    """Gathers the log probabilities of a stream whose events have those of their own tokens only."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def with_those_before(self, meta: dict[str, Any]) -> dict[str, Any]:
        """What is known of the answer, with the log probabilities of all its tokens so far."""
        for name in ("output_token_logprobs", "output_top_logprobs"):
            if name in meta:
                self._found[name] = meta[name] = [*self._found.get(name, ()), *meta[name]]
        return meta


@dataclass(frozen=True, slots=True)
class Generated:
    """The answers of a ``gen``: as many as its ``n``.

    Attributes:
        texts: The answers.
        usage: What they took.
        reasoning: The reasoning before each, where the server set it apart.
        meta: For each what else is known: ``finish_reason``, a text such as stop or length; ``matched_stop``, what ended it;
            ``output_token_logprobs`` and ``output_top_logprobs``.
    """

    texts: tuple[str, ...]
    usage: Usage
    reasoning: tuple[str, ...] = ()
    meta: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Where a program is: what decides whether a backend can do its next node.

    Attributes:
        chat: Whether it has used roles.
        outside: Whether it has text outside of roles.
        role: Whose turn it is.
        turn: Whether that turn has a text.
    """

    chat: bool = False
    outside: bool = False
    role: str | None = None
    turn: bool = False

    def after(self, node: Node) -> Position:
        """Where it is once a node is done."""
        if isinstance(node, RoleBegin):
            return Position(chat=True, outside=self.outside, role=node.role)
        if isinstance(node, RoleEnd):
            return Position(chat=True, outside=self.outside)
        if isinstance(node, Text) and not node.text.strip():
            return self if self.role is None else replace(self, turn=self.turn or bool(node.text))
        if isinstance(node, Text | Gen | Select | Shared | Image | Video):
            return replace(self, turn=True) if self.role is not None else replace(self, outside=True)
        return self


class Loop:
    """An event loop in a thread, for programs that are run by blocking calls. It starts on first use, and ends when it is closed
    or nobody refers to it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[[Callable[[], None]], Loop] | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """The loop."""
        with self._lock:
            if self._loop is None:
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                self._loop = loop = runner.get_loop()
                self._end = weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
                self._end.atexit = False
                threading.Thread(target=_run_until_stopped, args=(runner,), name="sapwood.lang", daemon=True).start()
            return self._loop

    def close(self) -> None:
        """Ends the thread; what runs there is cancelled."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._loop = self._end = None

    def wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs ``work`` there and waits; an interrupt cancels it."""
        future: Future[ResultT] = asyncio.run_coroutine_threadsafe(work, self.get())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _run_until_stopped(runner: asyncio.Runner) -> None:
    with runner:
        runner.get_loop().run_forever()


class PerLoop(Generic[ConnectionT]):
    """A connection for each event loop: gRPC's and HTTP's belong to the loop they are made in."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ConnectionT] = weakref.WeakKeyDictionary()

    def get(self, make: Any) -> ConnectionT:
        """This loop's; made if there is none."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = make()
        return self._made[loop]

    def pop(self) -> ConnectionT | None:
        """This loop's, which the caller closes."""
        return self._made.pop(asyncio.get_running_loop(), None)


class Backend(ABC):
    """Answers the nodes of programs. As a ``with`` block it closes the connection of blocking calls at the end.

    Attributes:
        name: What errors call it.
        template: How conversations are shown, or written where ``renders``.
        renders: Whether conversations go to the server as text by ``template``, not as messages.
        abilities: What it can do.
        options: The sampling options that it takes.
        loop: Where blocking calls run their programs.
    """

    name = "backend"
    abilities: frozenset[Ability] = frozenset()
    options: frozenset[str] = OPTION_NAMES

    def __init__(self, template: Template | str | None = None) -> None:
        self.renders = template is not None
        self.template = get_template(template) if isinstance(template, str) else template or get_template("plain")
        self.loop = Loop()

    @abstractmethod
    async def generate(self, prompt: Prompt, options: GenOptions) -> Generated:
        """The answers to a prompt. Raises what the backend's library raises."""

    async def stream(self, prompt: Prompt, options: GenOptions) -> AsyncIterator[Piece]:
        """The pieces of one answer, as they come. By default one piece, at the end."""
        found = await self.generate(prompt, options)
        yield Piece(found.texts[0], next(iter(found.reasoning), ""), found.usage, next(iter(found.meta), {}))

    async def score(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> tuple[list[Scored], Usage]:
        """How likely each choice is after the prompt; ``unconditional``: and without it."""
        raise NotImplementedError  # no node asks for it without Ability.SELECT

    async def commit(self, prompt: Prompt) -> Usage:
        """Computes the prompt and keeps it until :meth:`release`."""
        raise NotImplementedError  # no node asks for it without Ability.COMMIT

    async def warm(self, prompt: Prompt) -> None:  # noqa: B027 - not every backend has something to do
        """Computes a prefix that many rows will share. Where there is no such cache, nothing is done."""

    async def fork(self, parent: int, children: Sequence[int]) -> None:  # noqa: B027
        """States begin as another one is now, for backends that keep something for each."""

    async def release(self, states: Sequence[int]) -> None:  # noqa: B027 - not every backend has something to do
        """A program has ended: nothing needs to be kept for its states."""

    async def flush_cache(self) -> None:
        """Empties the server's cache of prefixes. Raises UnsupportedError if it cannot."""
        raise UnsupportedError("flush_cache", "", f"{self.name} cannot do it")

    async def server_info(self) -> Mapping[str, Any]:
        """What the server says of itself."""
        return {"backend": self.name}

    async def close(self) -> None:  # noqa: B027 - not every backend has something to do
        """Closes this loop's connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.wait(self.close())
        self.loop.close()

    def check(self, node: Node, at: Position, defaults: GenOptions) -> None:
        """Raises UnsupportedError if it cannot do a node.

        Args:
            node: The node.
            at: Where the program is.
            defaults: The run's options, which ``gen`` takes where it has none.
        """

        def refuse(what: str) -> None:
            raise UnsupportedError(str(node), node.line, f"{self.name} cannot do {what}")

        if isinstance(node, Shared):
            node = node.gen
        asks = isinstance(node, Gen | Select)
        says = asks or (isinstance(node, Text) and bool(node.text.strip()))
        if isinstance(node, Image) and Ability.IMAGE not in self.abilities:
            refuse("images: it serves text only")
        if isinstance(node, Image | Video) and self.renders:
            refuse(f"{node!s}s with a template: the server has to write the conversation")
        if isinstance(node, Video) and Ability.VIDEO not in self.abilities:
            refuse("videos")
        if isinstance(node, Commit) and Ability.COMMIT not in self.abilities:
            refuse(Ability.COMMIT)
        if isinstance(node, Reasoning) and Ability.REASONING not in self.abilities:
            refuse(Ability.REASONING)
        if not self.renders:
            if isinstance(node, RoleBegin) and Ability.ROLES not in self.abilities:
                refuse(Ability.ROLES)
            if says and at.role is None and Ability.TEXT not in self.abilities:
                refuse(f"{Ability.TEXT}: it takes conversations only")
            if says and at.role is None and at.chat:
                refuse(f"{Ability.TEXT} in a conversation, unless it has a template")
            if isinstance(node, RoleBegin) and at.outside:
                refuse(f"roles after {Ability.TEXT}, unless it has a template")
            if asks and at.role not in (None, "assistant"):
                refuse(f"a {at.role}'s turn by the model")
            if asks and at.role is not None and at.turn and Ability.PREFILL not in self.abilities:
                refuse(Ability.PREFILL)
        if isinstance(node, Select):
            if Ability.SELECT not in self.abilities:
                refuse(Ability.SELECT)
            if node.method.requires_unconditional and Ability.UNCONDITIONAL not in self.abilities:
                refuse(Ability.UNCONDITIONAL)
        if isinstance(node, Gen):
            options = merged(defaults, node.options)
            unknown = [name for name in options if name not in self.options]
            if unknown:
                refuse(f"the option {unknown[0]}")
            if options.get("token_healing") and at.chat and not self.renders:
                refuse("token_healing in a conversation: it is for texts")


def merged(defaults: GenOptions, own: GenOptions) -> GenOptions:
    """A node's options over the run's. A node's grammar takes the place of any other."""
    base = dict(defaults)
    if any(name in own for name in GRAMMARS):
        base = {name: value for name, value in base.items() if name not in GRAMMARS}
    return {**base, **own}  # type: ignore[typeddict-item]
