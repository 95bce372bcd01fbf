"""Tracing: a program's nodes without running it.

The program's function is called with a state that notes what is appended. What only a run could know is an :class:`Unknown`: it
can be appended and passed on; a program that looks into one ends its trace there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sapwood.lang.backends.base import Backend, Position
from sapwood.lang.errors import UntraceableError
from sapwood.lang.nodes import Fork, GenOptions, Node, RoleBegin, RoleEnd, Text, where


class Unknown(Node):
    """A value that only a run has."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __str__(self) -> str:
        raise self._looked()

    def __repr__(self) -> str:
        return f"Unknown({self.name!r})"

    __hash__ = object.__hash__

    def _looked(self) -> UntraceableError:
        return UntraceableError(f"the program looks at the value of {self.name!r} ({where()})")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._looked()

    def _look(self, *_: Any) -> Any:
        raise self._looked()

    __format__ = _look  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __len__ = __iter__ = _look
    __int__ = __float__ = __getitem__ = __contains__ = __index__ = __call__ = __mul__ = __sub__ = _look


@dataclass
class Trace:
    """What is known of a program without running it.

    Attributes:
        nodes: In the order in which the program appends them; each with the number of its state: 0, and one for each fork.
        stopped: Why the trace ended before the program did; None: it is whole.
    """

    nodes: list[tuple[int, Node]] = field(default_factory=list)
    stopped: str | None = None

    @property
    def prefix(self) -> list[Node]:
        """The nodes before the first that a run decides: constant texts and turns' borders."""
        found: list[Node] = []
        for state, node in self.nodes:
            if state or not isinstance(node, Text | RoleBegin | RoleEnd):
                break
            found.append(node)
        return found

    def __str__(self) -> str:
        lines = [f"%{number} [{state}] {node!r}" if isinstance(node, Unknown) else f"%{number} [{state}] {node!s}"
                 for number, (state, node) in enumerate(self.nodes)]  # fmt: skip
        return "\n".join([*lines, *([f"... {self.stopped}"] if self.stopped else [])])


class Tracer:
    """Takes the place of an interpreter.

    Args:
        backend: Refuses what it cannot do.
        defaults: The run's options.
        trace: Gets the nodes.
        only_prefix: The trace ends at the first node that a run decides.
        parent: The tracer that this one was forked from.
    """

    loop = None
    finished = idle = True
    returned: Any = None

    def __init__(
        self, backend: Backend, defaults: GenOptions, trace: Trace, *, only_prefix: bool, parent: Tracer | None = None
    ) -> None:
        self._backend, self.defaults, self._trace, self._only_prefix = backend, defaults, trace, only_prefix
        self._at: Position = Position() if parent is None else parent._at
        self._states: list[int] = [0] if parent is None else parent._states
        self._state = self._states[-1]
        self.submitted = 0
        self.variables: dict[str, Any] = {} if parent is None else dict(parent.variables)
        self.kinds: dict[str, str] = {}

    @property
    def text(self) -> str:
        """Raises UntraceableError."""
        raise UntraceableError(f"the program looks at its text ({where()})")

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Raises UntraceableError."""
        raise UntraceableError(f"the program looks at its messages ({where()})")

    meta = messages

    def submit(self, *nodes: Node) -> None:
        """Notes nodes. Raises UnsupportedError for one that the backend cannot do."""
        for node in nodes:
            known = Text("?", line=node.line) if isinstance(node, Unknown) else node
            self._backend.check(known, self._at, self.defaults)
            self._at = self._at.after(known)
            self._trace.nodes.append((self._state, node))
            self.submitted += 1
            for name in node.names:
                self.variables[name] = Unknown(name)
        decided = [node for node in nodes if not isinstance(node, Text | RoleBegin | RoleEnd)]
        if self._only_prefix and decided:
            raise UntraceableError(f"a run decides what comes here ({decided[0].line})")

    def fork(self, size: int) -> list[Tracer]:
        """Other tracers."""
        self.submit(Fork((None,) * size))
        made: list[Tracer] = []
        for _ in range(size):
            self._states.append(len(self._states))
            made.append(Tracer(self._backend, self.defaults, self._trace, only_prefix=self._only_prefix, parent=self))
        return made

    def future(self) -> Any:
        """Nothing waits here."""
        return None

    def pending(self, name: str) -> bool:
        """No node is on its way."""
        return False

    async def get(self, name: str) -> Any:
        """A variable; one that nobody has set may come from a join."""
        return self.variables.get(name, Unknown(name))

    async def drained(self) -> None:
        """Returns."""

    async def progress(self) -> None:
        """Returns."""


TRACING: ContextVar[Tracer | None] = ContextVar("sapwood.lang.tracing", default=None)
"""The trace under way: a program that is called by another one is traced, not run."""
