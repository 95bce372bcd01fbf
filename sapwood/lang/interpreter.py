"""Does the nodes of one state, one after the other, in one task of an event loop.

Invariants: all that a state holds is changed on its loop only, in the order in which the program submitted its nodes; the first
node that fails ends the state, and everybody who waits for a value of it gets that error. A fork is an interpreter of its own
that begins when its parent comes to the fork. Submitting never waits, so forks and nodes of different states run side by side.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from sapwood.lang.backends.base import Backend, Generated, Message, Position, Prompt, Usage, merged
from sapwood.lang.choices import Decision, Scored
from sapwood.lang.errors import ProgramError, line_of
from sapwood.lang.media import clip, picture
from sapwood.lang.nodes import (
    Commit,
    Fork,
    Gen,
    GenOptions,
    Image,
    Join,
    Node,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    SetVariable,
    Shared,
    Text,
    Video,
)
from sapwood.lang.speculation import Speculation

DEFAULT_MAX_TOKENS = 128
_NUMBERS = count(1)
_ANY = "*"
"""In the place of a name: a join may set any variable."""


@dataclass(slots=True)
class Event:
    """A node that was done.

    Attributes:
        state: The number of the state, from 0 in each run.
        node: What it did.
        line: Where the program says so.
        begin, end: Seconds since the run began.
        usage: What the server did for it; no requests: nothing.
        text: What it added.
        error: Why it failed; empty: it did not.
    """

    state: int
    node: str
    line: str
    begin: float
    end: float
    usage: Usage
    text: str
    error: str = ""


@dataclass(slots=True)
class Record:
    """What a run did: its events, and which state each fork came from."""

    started: float = field(default_factory=time.perf_counter)
    events: list[Event] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.started


class Interpreter:
    """One state of a running program.

    Args:
        backend: Answers.
        loop: Where it runs.
        defaults: The run's sampling options.
        streams: Whether answers are taken as they come.
        speculates: Tokens that a ``gen`` with a stop asks for beyond it, for what comes next; None: none.
        parent: The state that this is a fork of.

    Attributes:
        text, messages, variables, meta: What the program sees.
        error: Why it ended early.
        record: What the run did.
        returned: What the program returned.
    """

    def __init__(
        self,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        defaults: GenOptions,
        *,
        streams: bool = False,
        speculates: int | None = None,
        parent: Interpreter | None = None,
    ) -> None:
        self.backend, self.loop, self.defaults, self.streams = backend, loop, defaults, streams
        self.text = ""
        self.messages: list[Message] = []
        self.variables: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.error: ProgramError | None = None
        self.returned: Any = None
        self.kinds: dict[str, str] = {}
        """What the answers among the variables are, if not only texts: keys of ``VALUES``."""
        self.submitted = 0
        """Nodes so far, counted by who submits."""
        self.record: Record = Record() if parent is None else parent.record
        self.number = 0 if parent is None else len(parent.record.parents) + 1
        if parent is not None:
            self.record.parents[self.number] = parent.number
        self._id = next(_NUMBERS)
        self._parent = parent
        self._at = Position()
        self._turn_at = 0
        self._turn_parts: list[Mapping[str, Any]] = []
        self._fork_at = 0
        self._own: dict[str, None] = {}
        """Variables that its nodes have set, in order."""
        self._gathered: set[str] = set()
        self._scopes: list[int] = []
        """Where the scopes begin that have not ended, the innermost last."""
        self._reasoning: dict[str, list[str]] = {}
        """What the server set apart from the answers, or from each of several."""
        self._speculation = None if speculates is None else Speculation(speculates)
        self._queue: deque[Node] = deque()
        self._pending: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._begun = parent is None
        self._changed = asyncio.Event()
        self._children: list[Interpreter] = []
        self._scores: dict[bytes, asyncio.Task[tuple[list[Scored], Usage]]] = {} if parent is None else parent._scores
        """What this run's states have asked for, by a digest of text and choices."""
        self._ended = False

    # From the program, in any thread.

    def submit(self, *nodes: Node) -> None:
        """Adds nodes. Returns at once; raises the error of an earlier node."""
        if self.error is not None:
            raise self.error
        if self._ended:
            raise RuntimeError(f"the run has ended: nothing can be appended to its state ({nodes[0].line})")
        self.submitted += len(nodes)
        if _running_loop() is self.loop:
            self._append(nodes)
        else:
            self.loop.call_soon_threadsafe(self._append, nodes)

    def fork(self, size: int) -> list[Interpreter]:
        """So many states that begin as this one will be when it comes here."""
        speculates = None if self._speculation is None else self._speculation.tokens
        children = [
            Interpreter(
                self.backend, self.loop, self.defaults, streams=self.streams, speculates=speculates, parent=self
            )
            for _ in range(size)
        ]
        self._children += children
        self.submit(Fork(tuple(children)))
        return children

    # On the loop.

    async def get(self, name: str) -> Any:
        """A variable, once all nodes that set it are done. Raises KeyError, or the state's error."""
        await self._until(lambda: not self.pending(name))
        return self.variables[name]

    async def reached(self, name: str | None = None) -> None:
        """Returns once the run has ended, or a variable is there before. Raises the state's error."""
        await self._until(lambda: self._ended or (name in self.variables and not self.pending(str(name))))

    async def drained(self) -> None:
        """Returns once all nodes so far are done. Raises the state's error."""
        await self._until(lambda: self.idle)

    async def progress(self) -> None:
        """Returns once something has changed."""
        await self._changed.wait()

    async def finish(self) -> None:
        """The program has submitted all. Returns when this state and its forks are done; raises the first error."""
        family = self._family()
        try:
            for each in family:
                await each.drained()
        finally:
            for each in family:
                each._over()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way; only the loop itself knows for sure. A fork waits for its source to come to it."""
        return self._begun and self._task is None and not self._queue

    def future(self) -> asyncio.Future[Any]:
        """A future of the loop, for :class:`~sapwood.lang.nodes.Shared`."""
        return asyncio.Future(loop=self.loop)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    def pending(self, name: str) -> bool:
        """Whether a node that sets this variable is still to come, here or in the state that it was forked from."""
        return bool(not self._begun or self._pending[name] or self._pending[_ANY])

    async def cancel(self) -> None:
        """Stops this state and its forks; requests under way are cancelled at their servers."""
        for each in reversed(self._family()):
            task, each._task = each._task, None
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            each._end(each.error or ProgramError("run", "", "it was cancelled"))
            each._over()

    def _over(self) -> None:
        self._ended = True
        self._wake()

    def fail(self, what: str, error: Exception) -> None:
        """The program itself failed: notes it as the state's error, if there is none yet."""
        if self.error is None or self.error.node == "run":
            self.error = ProgramError(what, line_of(error), f"{type(error).__name__}: {error}")
            self.error.__cause__ = error

    async def release(self) -> None:
        """Lets the backend drop what it keeps for this state and its forks."""
        await self.backend.release([each._id for each in self._family()])

    def _family(self) -> list[Interpreter]:
        """This state and its forks, each before its own; a chain of forks may be longer than a stack is deep."""
        family = [self]
        for each in family:
            family += each._children
        return family

    async def _until(self, condition: Any) -> None:
        while not condition() and self.error is None:
            await self._changed.wait()
        if self.error is not None:
            raise self.error

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _append(self, nodes: Sequence[Node]) -> None:
        if self.error is not None:
            for node in nodes:
                self._abandon(node, self.error)
            return
        for node in nodes:
            self._pending.update(_sets(node))
        self._queue += nodes
        self._start()

    def _start(self) -> None:
        if self._task is None and self._begun and self._queue and self.error is None:
            self._task = self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        while self._queue:
            node = self._queue.popleft()
            begin, before = self.record.now(), len(self.text)
            usage = Usage(requests=0)
            try:
                self.backend.check(node, self._at, self.defaults)
                usage = await self._do(node) or usage
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._fail(node, error)
            else:
                self._at = self._at.after(node)
                for name in _sets(node):
                    self._pending[name] -= 1
                self._own |= dict.fromkeys(node.names)
            if not isinstance(node, Text | SetVariable) or self.error is not None:
                added, why = self.text[before:], "" if self.error is None else self.error.reason
                event = Event(self.number, str(node), node.line, begin, self.record.now(), usage, added, why)
                self.record.events.append(event)
            if self.error is not None:
                break
            self._wake()
        self._task = None
        self._wake()

    def _fail(self, node: Node, error: Exception) -> None:
        if not isinstance(error, ProgramError):
            cause, error = error, ProgramError(str(node), node.line, str(error) or type(error).__name__)
            error.__cause__ = cause
        self._end(error)
        self._abandon(node, error)

    def _end(self, error: ProgramError) -> None:
        """Ends the state: nothing more will be done, and what waits for it gets the reason."""
        if self.error is None:
            self.error = error
        left, self._queue = list(self._queue), deque()
        for node in left:
            self._abandon(node, error)
        self._wake()

    def _abandon(self, node: Node, error: ProgramError) -> None:
        """Tells those who wait for a node that will not be done."""
        if isinstance(node, Fork):
            for child in node.children:
                child._end(error)
        elif isinstance(node, Shared) and node.index == 0 and not node.asked.done():
            node.asked.set_exception(error)
            node.asked.exception()  # nobody may be waiting

    async def _do(self, node: Node) -> Usage | None:
        match node:
            case Text(text=text):
                self._fill(text)
            case Gen():
                return await self._generate(node)
            case Shared():
                return await self._generate_shared(node)
            case Select():
                return await self._select(node)
            case RoleBegin():
                self._begin_role(node)
            case RoleEnd():
                self._end_role(node)
            case Image(source=source):
                self._show("image_url", await asyncio.to_thread(picture, source))
            case Video(source=source):
                self._show("video_url", await asyncio.to_thread(clip, source))
            case ScopeBegin():
                self._scopes.append(len(self.text))
            case ScopeEnd(name=name):
                self._set(name, self.text[self._scopes.pop() :])
            case SetVariable(name=name, value=value):
                self._set(name, value)
            case Commit():
                return await self.backend.commit(self._prompt())
            case Fork(children=children):
                await self.backend.fork(self._id, [child._id for child in children])
                for child in children:
                    child._begin()
            case Join():
                await self._join(node)
            case Reasoning(name=name):
                self._separate(name)
            case _:
                raise TypeError(f"the interpreter does not know {type(node).__name__}")
        return None

    def _set(self, name: str, value: Any, kind: str | None = None) -> None:
        self.variables[name] = value
        self.kinds.pop(name, None)
        if kind is not None:
            self.kinds[name] = kind

    def _fill(self, text: str) -> None:
        if self._speculation is not None:
            self._speculation.take(text)
        self.text += text

    def _prompt(self) -> Prompt:
        turn: str | Sequence[Mapping[str, Any]] = self._turn_text()
        if self._turn_parts:
            turn = [*self._turn_parts, {"type": "text", "text": turn}]
        return Prompt(self.text, tuple(self.messages), self._at.role, turn, self._id)

    def _show(self, kind: str, url: str) -> None:
        """Appends a picture or a video to the turn."""
        self._turn_parts += [{"type": "text", "text": self._turn_text()}, {"type": kind, kind: {"url": url}}]
        self._turn_at = len(self.text)

    def _turn_text(self) -> str:
        return self.text[self._turn_at :] if self._at.role is not None else ""

    def _options(self, gen: Gen) -> GenOptions:
        return merged(merged({"max_tokens": DEFAULT_MAX_TOKENS}, self.defaults), gen.options)

    async def _generate(self, node: Gen) -> Usage:
        options = self._options(node)
        if self._speculation is not None and not self.streams and self._speculation.fits(options, self._prompt()):
            text, usage, meta = await self._speculation.answer(self.backend, self._prompt(), options)
            self._answered(node, Generated((text,), usage, meta=(meta,)), 0, several=False)
            return usage
        if self.streams and options.get("n", 1) == 1:
            return await self._generate_streamed(node, options)
        found = await self.backend.generate(self._prompt(), options)
        self._answered(node, found, 0, several=options.get("n", 1) > 1)
        return found.usage

    async def _generate_streamed(self, node: Gen, options: GenOptions) -> Usage:
        text, reasoning, usage = "", "", Usage()
        meta: dict[str, Any] = {}
        if node.name is not None:
            self.variables[node.name] = ""
        async for piece in self.backend.stream(self._prompt(), options):
            text += piece.text
            reasoning += piece.reasoning
            self.text += piece.text
            usage, meta = piece.usage or usage, {**meta, **piece.meta}
            if node.name is not None:
                self.variables[node.name] = text
                self.meta[node.name] = meta
            self._wake()
        self.text = self.text[: len(self.text) - len(text)] if text else self.text
        self._answered(node, Generated((text,), usage, (reasoning,), (meta,)), 0, several=False)
        return usage

    async def _generate_shared(self, node: Shared) -> Usage:
        """The first fork asks for all; the others take theirs from its answer."""
        if node.index:
            found: Generated = await asyncio.shield(node.asked)
            self._answered(node.gen, found, min(node.index, len(found.texts) - 1), several=False)
            return Usage(requests=0)
        options = self._options(node.gen)
        try:
            # Greedy answers are equal: one is enough.
            many = 1 if options.get("temperature") == 0 else node.size
            found = await self.backend.generate(self._prompt(), {**options, "n": many})
        except BaseException as error:
            if not node.asked.done():
                node.asked.set_exception(
                    error if isinstance(error, Exception) else ProgramError(str(node), node.line, "it was cancelled")
                )
                node.asked.exception()
            raise
        node.asked.set_result(found)
        self._answered(node.gen, found, 0, several=False)
        return found.usage

    def _answered(self, node: Gen, found: Generated, index: int, *, several: bool) -> None:
        text = found.texts[index]
        self.text += text
        if node.name is None:
            return
        self._set(node.name, list(found.texts) if several else text, node.kind)
        usage = found.usage
        meta = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        metas = [{**meta, **each} for each in found.meta] or [meta]
        self.meta[node.name] = metas if several else metas[min(index, len(metas) - 1)]
        self._reasoning[node.name] = list(found.reasoning if several else found.reasoning[index : index + 1])

    async def _select(self, node: Select) -> Usage:
        method = node.method
        scored: list[Scored] = []
        usage, decision = Usage(requests=0), Decision(0, (0.0,))
        if len(node.choices) > 1:
            scored, usage = await self._score(node)
            decision = method.decide(scored)
        choice = node.choices[decision.index]
        self._fill(choice)
        if node.name is not None:
            self._set(node.name, choice)
            self.meta[node.name] = {
                "method": method.name,
                "scores": dict(zip(node.choices, decision.scores, strict=True)),
                "logprobs": {each.text: list(each.logprobs) for each in scored},
                "unconditional": {each.text: list(each.unconditional) for each in scored if each.unconditional},
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
            }
        return usage

    async def _score(self, node: Select) -> tuple[list[Scored], Usage]:
        """How likely the choices are. States of a run whose texts are equal ask once for the same choices."""
        prompt, unconditional = self._prompt(), node.method.requires_unconditional
        if prompt.shows:
            return await self.backend.score(prompt, node.choices, unconditional=unconditional)
        text = repr((prompt.text, prompt.role, node.choices, unconditional))
        key = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        if (asked := self._scores.get(key)) is not None:
            return (await asyncio.shield(asked))[0], Usage(requests=0)
        task = self.loop.create_task(self.backend.score(prompt, node.choices, unconditional=unconditional))
        self._scores[key] = task
        try:
            return await task
        except BaseException:
            del self._scores[key]
            raise

    def _begin_role(self, node: RoleBegin) -> None:
        if self._at.role is not None:
            raise ValueError(f"the turn of {self._at.role} has not ended: roles cannot be nested")
        template = self.backend.template
        if not self.messages and node.role != "system" and template.default_system:
            before, after = template.around("system", first=True)
            self._fill(before + template.default_system + after)
            self.messages.append({"role": "system", "content": template.default_system})
        self._fill(template.around(node.role, first=not self.messages)[0])
        self._turn_at, self._turn_parts = len(self.text), []

    def _end_role(self, node: RoleEnd) -> None:
        if self._at.role != node.role:
            raise ValueError(f"no turn of {node.role} has begun")
        text = self._turn_text()
        content = [*self._turn_parts, {"type": "text", "text": text}] if self._turn_parts else text
        self.messages.append({"role": node.role, "content": content})
        self._turn_parts = []
        self._fill(self.backend.template.around(node.role, first=False)[1])

    def _begin(self) -> None:
        """Its parent has come to the fork."""
        parent = self._parent
        assert parent is not None
        self.text, self.messages = parent.text, list(parent.messages)
        self.variables, self.meta = dict(parent.variables), dict(parent.meta)
        self.kinds = dict(parent.kinds)
        self._at, self._turn_at, self._turn_parts = parent._at, parent._turn_at, list(parent._turn_parts)
        self._scopes, self._reasoning = list(parent._scopes), dict(parent._reasoning)
        self._fork_at = len(self.text)
        self._gathered = set(parent._gathered)
        self._begun = True
        self._start()
        self._wake()

    async def _join(self, node: Join) -> None:
        for child in node.children:
            await child.drained()
        if node.concatenate:
            self._fill("".join(child.text[child._fork_at :] for child in node.children))
            return
        found: dict[str, list[Any]] = {}
        kinds: dict[str, set[str | None]] = {}
        for child in node.children:
            for name in child._own:
                if name not in self.variables or name in self._gathered:
                    found.setdefault(name, []).append(child.variables[name])
                    kinds.setdefault(name, set()).add(child.kinds.get(name))
        for name, values in found.items():
            self._set(name, values, next(iter(kinds[name])) if len(kinds[name]) == 1 else None)
        self._own |= dict.fromkeys(found)
        self._gathered |= set(found)

    def _separate(self, name: str) -> None:
        found = self.variables[name]
        answers: list[str] = found if isinstance(found, list) else [found]
        apart = self._reasoning.get(name) or [""] * len(answers)
        pairs = [
            (reasoning, answer) if reasoning else _set_apart(answer)
            for reasoning, answer in zip(apart, answers, strict=True)
        ]
        if self.text.endswith(answers[0]):  # the text goes on with the first
            self.text = self.text[: len(self.text) - len(answers[0])] + pairs[0][1]
        several = isinstance(found, list)
        self.variables[name] = [answer for _, answer in pairs] if several else pairs[0][1]
        self.variables[f"{name}_reasoning_content"] = [each for each, _ in pairs] if several else pairs[0][0]


def _set_apart(whole: str) -> tuple[str, str]:
    """The reasoning that a text begins with, and the answer after it."""
    before, mark, answer = whole.partition("</think>")
    return (before.removeprefix("<think>").strip(), answer.lstrip()) if mark else ("", whole)


def _sets(node: Node) -> tuple[str, ...]:
    return (_ANY,) if isinstance(node, Join) else node.names


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
