"""The sandbox that chat templates run in: Jinja's own, with bounds on the time and memory of a rendering.

Templates come with models and clients feed them; Jinja's sandbox does not stop one that is, say, quadratic in the number of
messages. So the compiled body of each loop and macro begins with a check of the rendering's :class:`Budget`: all repetition
passes there. Cost: a function call for each iteration. Values are checked where templates make them grow: ``*``, ``**``, ``+``,
``~`` and ``set``. (What one call of a filter makes of a number, such as ``'' | center(10 ** 9)``, is not checked: only the
author of a template, not a client, can write that.)
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from sapwood_tokenizer.template.render_threads import Place

T = TypeVar("T")

_MOST_ELEMENTS = 16 * 1024 * 1024
_MOST_BITS = 4096

BUDGET = "\x00budget"
"""The template variable that holds the Budget of a rendering; no template can spell it."""
_CHECK_SIZE = "\x00size"


class BudgetError(Exception):
    """The rendering took too much of something, which the message names."""


class Budget:
    """Bounds on one rendering.

    Args:
        seconds: The most seconds it may take, from :meth:`start`.
        most_characters: The most characters of its text.
        place: Its place among other renderings; None: it takes no turns.
    """

    def __init__(self, seconds: float, most_characters: int, place: Place | None = None) -> None:
        self._place = place
        self._seconds = seconds
        self._characters = most_characters
        self._end = float("inf")
        self._cancelled = False

    def start(self) -> None:
        """Notes that the rendering begins."""
        self._end = time.monotonic() + self._seconds

    def cancel(self) -> None:
        """Has the rendering end: its text is not needed. Only this method may be called by another thread."""
        self._cancelled = True

    def check_time(self) -> None:
        """Raises BudgetError if the time is over or the rendering was cancelled. May wait while others have their turn."""
        now = time.monotonic()
        if self._place is not None and now > self._place.next_check:
            self._place.check(self._end)
            now = time.monotonic()
        if self._cancelled:
            raise BudgetError("it was cancelled")
        if now > self._end:
            raise BudgetError(f"it did not end within {self._seconds:.3g} s")

    def add(self, characters: int) -> None:
        """Counts text; raises BudgetError when it is too much."""
        self._characters -= characters
        if self._characters < 0:
            raise BudgetError("the text grows too long")


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``, with which some templates mark what the assistant says for training.

    What is inside is rendered as if the marks were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the settings that chat templates are written for, within a Budget.

    Renderings must get a started Budget as the variable ``BUDGET``.
    """

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag])
        self.filters[BUDGET] = _check_time
        self.filters[_CHECK_SIZE] = _check_size

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        # Jinja's hook for changing how templates are compiled.
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *source.find_all(nodes.For), *source.find_all(nodes.Macro), *source.find_all(nodes.CallBlock)
        ]  # fmt: skip
        for block in repeated:
            block.body.insert(
                0, nodes.ExprStmt(_filter(nodes.Const(None, lineno=block.lineno), BUDGET), lineno=block.lineno)
            )
        for assignment in list(source.find_all(nodes.Assign)):
            assignment.node = _filter(assignment.node, _CHECK_SIZE)
        for captured in list(source.find_all(nodes.AssignBlock)):
            captured.filter = _filter(captured.filter, _CHECK_SIZE)
        for concat in list(source.find_all(nodes.Concat)):
            concat.nodes = [_filter(node, _CHECK_SIZE) for node in concat.nodes]
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Raises BudgetError for an operation that would make a very large value of small ones."""
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple):
                _check_size(one)
                if operator == "*" and isinstance(other, int) and other * len(one) > _MOST_ELEMENTS:
                    raise BudgetError("a repeated value is too long")
            elif isinstance(one, int) and one.bit_length() > _MOST_BITS:
                raise BudgetError("a number is too large")
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and integers and left.bit_length() * right > _MOST_BITS:
            raise BudgetError("a power is too large")
        return super().call_binop(context, operator, left, right)


def _filter(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=1 if node is None else node.lineno)


@jinja2.pass_context
def _check_time(context: jinja2.runtime.Context, value: None) -> None:
    context.parent[BUDGET].check_time()


def _check_size(value: T) -> T:
    if isinstance(value, str | list | tuple) and len(value) > _MOST_ELEMENTS:
        raise BudgetError("a value grows too long")
    return value
