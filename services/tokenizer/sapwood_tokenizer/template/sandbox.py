"""The sandbox that chat templates run in: Jinja's own, with the settings that chat templates are written for.

It keeps a template from Python's inside, not from using time and memory without end: one filter of a large number does that. So
templates are compiled and rendered in processes that are killed at a deadline (``serve/render_process.py``). Nothing of a
template is computed when it is compiled: what it does is done while it renders, for one request.
"""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser


class NoContent:
    """The content of a message that has none: templates see none in it, and it is written as nothing, not as ``None``.

    Templates that look into content find it empty.
    """

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "None"  # inside of what is written as Python would

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NoContent)

    def __hash__(self) -> int:
        return hash(None)

    def __len__(self) -> int:
        return 0

    def __contains__(self, item: object) -> bool:
        return False

    def __add__(self, other: object) -> object:
        return other

    def __radd__(self, other: object) -> object:
        return other


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``, with which some templates mark what the assistant says for training.

    What is inside is rendered as if the marks were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Generator(CodeGenerator):
    """Writes what is constant in a template to be computed when it renders."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Tracker(_Generator, jinja2.meta.TrackingCodeGenerator):
    """Finds the variables that a template reads and does not set, and computes nothing either."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the settings that chat templates are written for."""

    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[jinja2.ext.loopcontrols, GenerationTag],
        )
        self.tests["none"] = _is_none

    def variables_of(self, template: nodes.Template) -> set[str]:
        """The variables that a template reads before it sets them, or asks whether they are defined."""
        tracker = _Tracker(self)
        tracker.visit(template)
        asked = {
            test.node.name
            for test in template.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        return tracker.undeclared_identifiers | asked


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, NoContent)
