"""How Sapwood starts Python processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("sapwood", "services", "kernels")


def _commands(tree: ast.AST) -> Iterator[ast.expr]:
    """Each list or tuple that begins with ``sys.executable``, and each call's arguments that do."""
    for node in ast.walk(tree):
        match node:
            case ast.List(elts=[first, *_]) | ast.Tuple(elts=[first, *_]) if ast.unparse(first) == "sys.executable":
                yield node


def test_every_command_of_python_leaves_the_current_folder_out() -> None:
    found = 0
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.py"):
            for command in _commands(ast.parse(path.read_text())):
                found += 1
                assert isinstance(command, ast.List | ast.Tuple)
                options = [ast.unparse(each) for each in command.elts[1:2]]
                assert options == ["'-P'"], f"{path}:{command.lineno}: start it by sapwood_common.python_process"
    assert found >= 3, "the helper's own, and those of the kernels' compilers"
